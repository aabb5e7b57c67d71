"""Routes of packaged configurations."""

import asyncio
from typing import Annotated

from fastapi import APIRouter, Path, Response

from offbeat.services.control.console.schemas import RecipesView, RecipeView
from offbeat.services.control.http_errors import HttpError, refusals
from offbeat.services.control.interfaces import Recipes

YAML_TYPE = "application/yaml"
Name = Annotated[str, Path(max_length=200, description="As in the list, such as `recipes/dapo`.")]


def recipe_routes(packaged: Recipes) -> APIRouter:
    routes = APIRouter(tags=["runs"])

    @routes.get("/recipes", responses=refusals())
    async def list_recipes() -> RecipesView:
        """List packaged configurations."""
        names = await asyncio.to_thread(packaged.recipes)
        return RecipesView(recipes=[RecipeView(name=name, about=about) for name, about in names.items()])

    @routes.get(
        "/recipes/{name:path}",
        response_class=Response,
        responses={200: {"content": {YAML_TYPE: {"schema": {"type": "string"}}}}, **refusals(404, 422)},
    )
    async def show_recipe(name: Name) -> Response:
        """Packaged configuration as YAML, with what it includes."""
        names = await asyncio.to_thread(packaged.recipes)
        if name not in names:
            raise HttpError(404, "unknown_recipe", f"there is no recipe {name!r}: {', '.join(names)}")
        return Response(await asyncio.to_thread(packaged.recipe, name), media_type=YAML_TYPE)

    return routes
