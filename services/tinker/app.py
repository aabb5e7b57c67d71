"""HTTP routes of Tinker's API, as the SDK (0.38) calls them.

Invariant: a refusal is JSON with the reason; 408 asks to fetch again, 410 to send again, 429 to wait, 503 to repeat.
"""

import logging
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict
from typing import Annotated, Any

from fastapi import APIRouter, Depends, FastAPI, Header, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from redis import exceptions as redis_errors

from offbeat.services.control.auth import is_from_this_host
from offbeat.services.errors import RetryableError
from offbeat.services.redis.errors import complaint
from offbeat.services.tinker.body_limits import BodyLimits
from offbeat.services.tinker.config import TinkerConfig
from offbeat.services.tinker.errors import ForbiddenError, NotFoundError, TinkerError
from offbeat.services.tinker.exposition import expose
from offbeat.services.tinker.listings import TinkerListings
from offbeat.services.tinker.owners import Keys
from offbeat.services.tinker.refusals import check_metadata
from offbeat.services.tinker.refused_routes import NO_PROJECTS, add_refused
from offbeat.services.tinker.schemas import (
    CheckpointBody,
    CopyWeightsBody,
    CreateModelBody,
    CreateSamplerBody,
    CreateSessionBody,
    ExternalWeightsBody,
    FutureBody,
    LoadWeightsBody,
    ModelBody,
    OptimStepBody,
    SampleBody,
    SamplerWeightsBody,
    SaveWeightsBody,
    SessionBody,
    TtlBody,
)
from offbeat.services.tinker.service import NO_TOKENS, TinkerService
from offbeat.services.tinker.wire import SampleAnswer, decode_sample_response

logger = logging.getLogger(__name__)

OUTAGES = (redis_errors.ConnectionError, redis_errors.TimeoutError)
"""Also of a Redis that refuses writes; other errors of redis-py are no outage."""
PROTOBUF = "application/x-protobuf"
Json = dict[str, Any]
Offset = Annotated[int, Query(ge=0)]
Limit = Annotated[int, Query(ge=1, le=1000)]


def _service(request: Request) -> TinkerService:
    return request.app.state.service


def _listings(request: Request) -> TinkerListings:
    return TinkerListings(request.app.state.service)


def _owner(request: Request, x_api_key: Annotated[str, Header()] = "") -> str:
    """Return the caller's id; raises UnauthorizedError, and without `keys_file` ForbiddenError for other sites' pages."""
    keys: Keys = request.app.state.keys
    if not keys.are_checked and not is_from_this_host(request):
        raise ForbiddenError("without keys_file only programs on this machine may call, at 127.0.0.1 or localhost")
    return keys.owner(x_api_key)


Service = Annotated[TinkerService, Depends(_service)]
Listings = Annotated[TinkerListings, Depends(_listings)]
Owner = Annotated[str, Depends(_owner)]

router = APIRouter(prefix="/api/v1")
add_refused(router, Depends(_owner))


def create_app(service: TinkerService, keys: Keys, config: TinkerConfig) -> FastAPI:
    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with service.background():
            yield

    app = FastAPI(title="Offbeat: Tinker's API", lifespan=lifespan)
    app.state.service, app.state.keys, app.state.config = service, keys, config
    app.add_middleware(BodyLimits, check_key=lambda request: _owner(request, request.headers.get("x-api-key", "")))
    app.include_router(router)
    app.add_exception_handler(TinkerError, _refuse)
    app.add_exception_handler(RequestValidationError, _refuse_body)
    for kind in (RetryableError, *OUTAGES, OSError):
        app.add_exception_handler(kind, _ask_again)
    return app


async def _refuse(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, TinkerError)
    return JSONResponse({"detail": str(error)}, error.status)


async def _refuse_body(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    issues = [f"{'.'.join(map(str, issue['loc']))}: {issue['msg']}" for issue in error.errors()]
    return JSONResponse({"detail": "; ".join(issues)}, 422)


async def _ask_again(request: Request, error: Exception) -> JSONResponse:
    """Answer that the engine, Redis or the disk has failed."""
    logger.warning("%s %s: %s", request.method, request.url.path, error)
    return JSONResponse({"detail": complaint(error) if isinstance(error, OUTAGES) else str(error)}, 503)


def _future(ids: tuple[str, str]) -> Json:
    return {"request_id": ids[0], "model_id": ids[1]}


def _sample(answer: SampleAnswer) -> Json:
    """Return a sample, with what was asked of its prompt: null for tokens without a score."""
    content: Json = {"sequences": [asdict(each) for each in answer.sequences]}
    if answer.prompt_logprobs is not None:
        content["prompt_logprobs"] = [None if math.isnan(each) else each for each in answer.prompt_logprobs]
    if answer.prompt_top is not None:
        content["topk_prompt_logprobs"] = [list(each) if each.ids else None for each in answer.prompt_top]
    return content


@router.get("/healthz")
async def healthz(service: Service) -> Json:
    await service.check()
    return {"status": "ok"}


@router.post("/client/config")
async def client_config(_: Owner, request: Request) -> Json:
    config: TinkerConfig = request.app.state.config
    # Sent at once, the first chunk of a call is the last to be sent: no limit of bytes could be waited at
    return {"sample_max_concurrent_requests": config.max_samples, "parallel_fwdbwd_chunks": False}


@router.post("/client/dynamic_config")
async def client_dynamic_config(_: Owner) -> Json:
    return {"sample_cancel_enabled": True}


@router.get("/get_server_capabilities")
async def get_server_capabilities(_: Owner, service: Service) -> Json:
    model = {
        "model_name": service.base.name,
        "max_context_length": service.base.context,
        "trainable": True,
        "sampleable": True,
    }
    return {"supported_models": [model]}


@router.post("/create_session")
async def create_session(owner: Owner, service: Service, body: CreateSessionBody) -> Json:
    check_metadata(body.user_metadata)
    session_id = await service.records.create_session(owner, body.user_metadata, body.display_name)
    return {"type": "create_session", "session_id": session_id}


@router.post("/session_heartbeat")
async def session_heartbeat(owner: Owner, service: Service, body: SessionBody) -> Json:
    await service.records.heartbeat(owner, body.session_id)
    return {"type": "session_heartbeat"}


@router.post("/sessions/{session_id}/finish")
async def finish_session(owner: Owner, service: Service, session_id: str) -> Json:
    await service.records.finish_session(owner, session_id)
    return {}


@router.post("/telemetry")
async def telemetry(_: Owner) -> Json:
    """Accept and drop the SDK's telemetry."""
    return {"status": "accepted"}


@router.post("/create_model")
async def create_model(owner: Owner, service: Service, body: CreateModelBody) -> Json:
    return _future(await service.create_model(owner, body))


@router.post("/get_info")
async def get_info(owner: Owner, service: Service, body: ModelBody) -> Json:
    """Return a model; `model_data.model_name` is the folder with the tokenizer."""
    record, base = await service.records.model(owner, body.model_id), service.base
    return {
        "type": "get_info",
        "model_id": body.model_id,
        "model_data": {"arch": base.architecture, "model_name": base.folder, "tokenizer_id": base.folder},
        "model_name": base.name,
        "is_lora": True,
        "lora_rank": record.lora.rank,
    }


@router.post("/forward_backward")
async def forward_backward(owner: Owner, service: Service, request: Request) -> Json:
    return _future(await service.forward_backward(owner, await request.body()))


@router.post("/optim_step")
async def optim_step(owner: Owner, service: Service, body: OptimStepBody) -> Json:
    return _future(await service.optim_step(owner, body))


@router.post("/save_weights")
async def save_weights(owner: Owner, service: Service, body: SaveWeightsBody) -> Json:
    return _future(await service.save_weights(owner, body))


@router.post("/load_weights")
async def load_weights(owner: Owner, service: Service, body: LoadWeightsBody) -> Json:
    return _future(await service.load_weights(owner, body))


@router.post("/save_weights_for_sampler")
async def save_weights_for_sampler(owner: Owner, service: Service, body: SamplerWeightsBody) -> Json:
    return _future(await service.save_weights_for_sampler(owner, body))


@router.post("/save_weights_external")
async def save_weights_external(owner: Owner, service: Service, body: ExternalWeightsBody) -> Json:
    """Refuse the command in its place."""
    return _future(await service.save_weights_external(owner, body))


@router.post("/copy_weights")
async def copy_weights(
    owner: Owner,
    service: Service,
    body: CopyWeightsBody,
    x_idempotency_key: Annotated[str, Header(max_length=1000)] = "",
    x_tinker_weights_access_token: Annotated[str, Header()] = "",
) -> Json:
    try:
        return {"tinker_path": await service.checkpoints.copy(owner, body, x_idempotency_key)}
    except NotFoundError as error:
        raise NotFoundError(NO_TOKENS if x_tinker_weights_access_token else str(error)) from None


@router.post("/create_sampling_session")
async def create_sampling_session(owner: Owner, service: Service, body: CreateSamplerBody) -> Json:
    return {"type": "create_sampling_session", "sampling_session_id": await service.create_sampler(owner, body)}


@router.get("/samplers/{sampler_id}")
async def get_sampler(owner: Owner, service: Service, sampler_id: str) -> Json:
    """Return a sampler; `base_model` is the folder with the tokenizer."""
    record = await service.records.sampler(owner, sampler_id)
    return {"sampler_id": sampler_id, "base_model": service.base.folder, "model_path": record.model_path}


@router.post("/asample")
async def asample(owner: Owner, service: Service, body: SampleBody) -> Json:
    request_id, sequence_ids = await service.sample(owner, body)
    return {"request_id": request_id, "sample_sequence_ids": sequence_ids}


@router.post("/retrieve_future")
async def retrieve_future(owner: Owner, service: Service, body: FutureBody, request: Request) -> Response:
    """Return a result; a sample with token versions also as JSON, to clients that do not accept protobuf."""
    result = await service.retrieve(owner, body.request_id)
    if result is None:
        again = {"type": "try_again", "request_id": body.request_id, "queue_state": "active"}
        return JSONResponse(again, 408)
    if not result.is_protobuf:
        return Response(result.body, media_type="application/json")
    if PROTOBUF not in request.headers.get("accept", "") and ":sample:" in body.request_id:
        return JSONResponse(_sample(decode_sample_response(result.body)))
    return Response(result.body, media_type=PROTOBUF)


@router.post("/cancel_future")
async def cancel_future(owner: Owner, service: Service, body: FutureBody) -> Json:
    await service.cancel(owner, body.request_id)
    return {}


@router.post("/weights_info")
async def weights_info(owner: Owner, listings: Listings, body: CheckpointBody) -> Json:
    return await listings.weights_info(owner, body.tinker_path)


@router.get("/sessions")
async def sessions(owner: Owner, listings: Listings, offset: Offset = 0, limit: Limit = 20) -> Json:
    return await listings.sessions(owner, offset, limit)


@router.get("/sessions/{session_id}")
async def session(owner: Owner, listings: Listings, session_id: str) -> Json:
    return await listings.session(owner, session_id)


@router.get("/training_runs")
async def training_runs(
    owner: Owner, listings: Listings, offset: Offset = 0, limit: Limit = 20, project_id: str | None = None
) -> Json:
    if project_id is not None:
        raise TinkerError(f"project_id: {NO_PROJECTS}")
    return await listings.training_runs(owner, offset, limit)


@router.get("/training_runs/{model_id}")
async def training_run(owner: Owner, listings: Listings, model_id: str) -> Json:
    return await listings.training_run(owner, model_id)


@router.get("/training_runs/{model_id}/checkpoints")
async def checkpoints_of(owner: Owner, listings: Listings, model_id: str) -> Json:
    return await listings.checkpoints_of(owner, model_id)


@router.get("/training_runs/{model_id}/metrics")
async def metrics(owner: Owner, listings: Listings, model_id: str) -> Json:
    """Return a model's optimizer steps; not called by the SDK."""
    return await listings.metrics(owner, model_id)


@router.get("/training_runs/{model_id}/samples")
async def samples(owner: Owner, listings: Listings, model_id: str) -> Json:
    """Return what was sampled from a model, by version; not called by the SDK."""
    return await listings.samples(owner, model_id)


@router.get("/training_runs/{model_id}/audit")
async def audit(owner: Owner, listings: Listings, model_id: str) -> Json:
    """Verify that each acknowledged command is in the weights once; not called by the SDK."""
    return await listings.audit(owner, model_id)


@router.get("/training_runs/{model_id}/why")
async def why(owner: Owner, listings: Listings, model_id: str) -> Json:
    """Return what a model waits for; not called by the SDK."""
    return await listings.why(owner, model_id)


@router.get("/metrics", response_class=Response)
async def prometheus(owner: Owner, service: Service, accept: Annotated[str, Header(max_length=1000)] = "") -> Response:
    """Return the open models of a key for Prometheus; not called by the SDK."""
    body, media_type = await expose(service.store, owner, accept)
    return Response(body, headers={"content-type": media_type})


@router.delete("/training_runs/{model_id}/checkpoints/{checkpoint_id:path}")
async def delete_checkpoint(owner: Owner, service: Service, model_id: str, checkpoint_id: str) -> Json:
    await service.checkpoints.delete(owner, f"tinker://{model_id}/{checkpoint_id}")
    return {}


@router.put("/training_runs/{model_id}/checkpoints/{checkpoint_id:path}/ttl")
async def set_checkpoint_ttl(owner: Owner, service: Service, model_id: str, checkpoint_id: str, body: TtlBody) -> Json:
    await service.checkpoints.set_ttl(owner, f"tinker://{model_id}/{checkpoint_id}", body.ttl_seconds)
    return {}


@router.get("/billing/usage/checkpoints/current")
async def storage(owner: Owner, listings: Listings) -> Json:
    return await listings.storage(owner)


@router.get("/checkpoints")
async def checkpoints(owner: Owner, listings: Listings, offset: Offset = 0, limit: Limit = 100) -> Json:
    return await listings.checkpoints(owner, offset, limit)
