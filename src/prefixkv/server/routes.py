"""The endpoints."""

from __future__ import annotations

import time
import uuid
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from prefixkv import __version__
from prefixkv.request import Params
from prefixkv.server.errors import error_body
from prefixkv.server.generation import Job, collected, while_connected
from prefixkv.server.messages import chat_messages
from prefixkv.server.metrics import registry
from prefixkv.server.protocol import ChatRequest, CompletionBase, CompletionRequest, parse_body
from prefixkv.server.serving import Serving
from prefixkv.server.shapes import ChatShape, CompletionShape, Shape, envelope, usage
from prefixkv.server.streaming import streamed

router = APIRouter()


@router.post("/v1/chat/completions")
async def chat_completions(request: Request) -> Response:
    """OpenAI's chat: the model's chat template turns messages into a prompt."""
    serving = _serving(request)
    body, messages = await serving.bodies.read(request, _chat)
    model, params = serving.model(body.model), body.params()
    prompt = await serving.prompts.chat(messages)
    job = _job("chatcmpl", body, model, [prompt], params)
    return await _answer(serving, request, job, ChatShape(serving.token_text))


@router.post("/v1/completions")
async def completions(request: Request) -> Response:
    """OpenAI's completions: text or token ids go on as they are."""
    serving = _serving(request)
    body = await serving.bodies.read(request, _completion)
    model, params = serving.model(body.model), body.params()
    prompts = await serving.prompts.completion(body.prompt)
    job = _job("cmpl", body, model, prompts, params)
    return await _answer(serving, request, job, CompletionShape(serving.token_text))


@router.get("/v1/models")
async def models(request: Request) -> JSONResponse:
    """The names of the served model."""
    serving = _serving(request)
    data = [_model(serving, name) for name in serving.model_names]
    return JSONResponse({"object": "list", "data": data})


@router.get("/v1/models/{name:path}")
async def model(request: Request, name: str) -> JSONResponse:
    """One of those names; 404 for any other."""
    serving = _serving(request)
    return JSONResponse(_model(serving, serving.model(name)))


@router.get("/health")
async def health(request: Request) -> JSONResponse:
    """200 while the engine is alive, else 503."""
    if _serving(request).engine.is_alive:
        return JSONResponse({"status": "ok"})
    return JSONResponse(error_body(503, "the engine has stopped", code="engine_error"), 503)


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    """Prometheus text."""
    serving = _serving(request)
    text = generate_latest(registry(serving.engine, serving.latencies, serving.model_names[0]))
    return Response(text, media_type=CONTENT_TYPE_LATEST)


@router.get("/version")
async def version() -> JSONResponse:
    """The version of prefixkv."""
    return JSONResponse({"version": __version__})


def _serving(request: Request) -> Serving:
    serving: Serving = request.app.state.serving
    return serving


def _model(serving: Serving, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": serving.created,
        "owned_by": "prefixkv",
        "max_model_len": serving.engine.max_model_len,
    }


def _chat(data: bytes) -> tuple[ChatRequest, list[dict[str, str]]]:
    body = parse_body(data, ChatRequest)
    return body, chat_messages(body.messages)


def _completion(data: bytes) -> CompletionRequest:
    return parse_body(data, CompletionRequest)


def _job(
    kind: str, body: CompletionBase, model: str, prompts: list[list[int]], params: Params
) -> Job:
    return Job(
        id=f"{kind}-{uuid.uuid4().hex}",
        model=model,
        prompts=prompts,
        params=params,
        n=body.n,
        cache_salt=body.cache_salt,
        stream=body.stream,
        include_usage=body.include_usage,
    )


async def _answer(serving: Serving, request: Request, job: Job, shape: Shape) -> Response:
    created = int(time.time())
    if job.stream:
        return await streamed(serving, request, job, shape, created)
    outputs = await while_connected(request, collected(serving, job))
    choices = [
        shape.choice(at * job.n + sample.index, sample)
        for at, output in enumerate(outputs)
        for sample in output.samples
    ]
    answer = envelope(job, created, shape.whole, choices) | {"usage": usage(outputs)}
    return JSONResponse(answer)
