"""The smallest server over the engine, to read and to start from: `python -m quire.server.demo [MODEL]`.

    curl -N localhost:8000/generate -d '{"prompt": "import os", "max_tokens": 32}'

One route that streams text. For anything real use `quire serve`: it validates bodies, has keys and limits, notices
slow clients, and speaks OpenAI's API.
"""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from contextlib import aclosing

import uvicorn
from fastapi import FastAPI, Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from quire import AsyncLLMEngine, EngineArgs, RequestOutput
from quire.errors import RequestError
from quire.sampling_params import RequestOutputKind


def create_demo(engine: AsyncLLMEngine) -> FastAPI:
    """An application with one route."""
    app = FastAPI()

    @app.post("/generate")
    async def generate(request: Request) -> Response:
        """Text as it is generated. The body: `prompt`, and any field of SamplingParams."""
        fields = await request.json()
        prompt = fields.pop("prompt", "")
        try:
            params = engine.default_params.clone(**fields, output_kind=RequestOutputKind.DELTA)
            outputs = engine.generate(prompt, params)
            first = await anext(outputs)  # a request that is wrong says so here, before the reply has begun
        except RequestError as error:
            return JSONResponse({"error": str(error)}, error.status)
        return StreamingResponse(_text(first, outputs), media_type="text/plain")

    return app


async def _text(first: RequestOutput, outputs: AsyncIterator[RequestOutput]) -> AsyncIterator[str]:
    """The pieces of text; when the client leaves, this is closed, which aborts the request."""
    async with aclosing(outputs):  # type: ignore[type-var]
        yield first.outputs[0].text
        async for output in outputs:
            yield output.outputs[0].text


def main() -> None:
    """Serve on port 8000 of this machine."""
    model = sys.argv[1] if len(sys.argv) > 1 else None
    with AsyncLLMEngine.from_engine_args(EngineArgs(model=model)) as engine:
        uvicorn.run(create_demo(engine), host="127.0.0.1", port=8000, log_level="warning")


if __name__ == "__main__":
    main()
