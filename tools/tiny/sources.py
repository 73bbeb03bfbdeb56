"""Which packages the corpus is taken from, and which licences it may carry."""

from __future__ import annotations

import re

ALLOWED_LICENSES = [
    (r"(psf|python)[- ]?(2\.0|software foundation license)", "PSF-2.0"),
    (r"mit|expat|mit license|x11|ncurses|mit/x11|mit-style", "MIT"),
    (r"mit-cmu|hpnd", "MIT-CMU"),
    (r"bsd|bsd[- ]?3([- ]clause)?(-.*)?|bsd license|bsd-3-clause license|(3|three)-clause bsd license", "BSD-3-Clause"),
    (r"bsd-2-clause(-.*)?", "BSD-2-Clause"),
    (r"isc|isc license.*", "ISC"),
    (r"apache[- ]?2(\.0)?|apache[- ](software )?license(,? (version )?2(\.0)?)?|apache", "Apache-2.0"),
    (r"apache-2\.0 with llvm-exception", "Apache-2.0 WITH LLVM-exception"),
    (r"mit or apache-2\.0|apache-2\.0 or mit|mit and apache-2\.0|apache-2\.0 and mit", "MIT OR Apache-2.0"),
    (r"zlib|0bsd|unlicense|cc0-1\.0|public-domain", "public domain or equivalent"),
    (r"curl", "curl"),
    (r"bsd-3-clause and .*", "BSD-3-Clause"),
]
"""Pattern of what a package says, and the name the manifest gives it."""

STDLIB_SKIP = re.compile(
    r"(^|/)(site-packages|tests?|idle_test|lib2to3|pydoc_data|turtledemo|ensurepip|__pycache__|lib-dynload|config-3)"
    r"(/|$)|^encodings/(?!__init__|aliases|utf_8|idna|punycode|ascii)|^_sysconfigdata|^test|_pydecimal|^__phello__"
)
"""Tests, generated tables and vendored code."""

PYTHON_PACKAGES = [
    "torch", "numpy", "huggingface_hub", "transformers", "tokenizers", "safetensors", "accelerate", "pydantic",
    "pydantic_core", "jinja2", "markupsafe", "rich", "typer", "click", "fsspec", "filelock", "packaging", "msgpack",
    "msgspec", "pyyaml", "psutil", "anyio", "h11", "httpcore", "httpx", "idna", "starlette", "fastapi", "uvicorn",
    "prometheus-client", "opentelemetry-api", "opentelemetry-sdk", "pytest", "pluggy", "setuptools", "pygments",
    "markdown-it-py", "typing_extensions", "annotated-types", "xxhash", "networkx", "pillow", "uvloop", "sniffio",
    "websockets", "aiohttp", "attrs", "openai", "protobuf", "wheel", "build", "importlib-metadata",
]  # fmt: skip
"""Packages quire, its extras or its tests depend on; those not installed or not permissive are left out."""

DEBIAN_PACKAGES = {
    "cmake": "BSD-3-Clause", "cmake-data": "BSD-3-Clause", "openssl": "Apache-2.0", "libssl-doc": "Apache-2.0",
    "curl": "curl", "libcurl4-doc": "curl", "zstd": "BSD-3-Clause", "tmux": "ISC",
    "ncurses-bin": "MIT", "openssh-client": "BSD-2-Clause", "openssh-server": "BSD-2-Clause",
    "libarchive-tools": "BSD-2-Clause", "file": "BSD-2-Clause",
    "bzip2": "BSD-3-Clause", "ninja-build": "Apache-2.0", "redis-tools": "BSD-3-Clause",
    "tcpdump": "BSD-3-Clause", "libpcap-dev": "BSD-3-Clause", "ripgrep": "MIT OR Apache-2.0",
    "fd-find": "MIT OR Apache-2.0", "bat": "MIT OR Apache-2.0", "python3.11-minimal": "PSF-2.0", "mandoc": "ISC",
    "libxml2-utils": "MIT", "expat": "MIT", "nghttp2-client": "MIT", "brotli": "MIT",
    "llvm-14": "Apache-2.0 WITH LLVM-exception", "clang-14": "Apache-2.0 WITH LLVM-exception",
    "lldb-14": "Apache-2.0 WITH LLVM-exception", "nginx-common": "BSD-2-Clause", "memcached": "BSD-3-Clause",
    "libtirpc-dev": "BSD-3-Clause", "netcat-openbsd": "BSD-3-Clause",
}  # fmt: skip
"""Debian packages whose pages are used, with the licence of their upstream pages as reviewed."""

MANUAL_PAGES_SKIP = re.compile(r"^(bzdiff|bzexe|bzgrep|bzmore|pzstd|ssh-argv0|sqldiff)\.")
"""Pages that Debian added to those packages, or that come from elsewhere, under another licence."""

REVIEWED_PYTHON_LICENSES = {"torch": "BSD-3-Clause", "transformers": "Apache-2.0", "packaging": "Apache-2.0"}
"""Packages whose own Python files have one licence where the metadata names those of bundled code, or two at choice."""

PYTHON_FILES_SKIP = re.compile(
    r"(^|/)(_?tests?|testing|_vendor|vendored|conftest)(/|_|\.)|^transformers/(models|kernels)/|^torch/(_inductor|onnx)/"
    r"|^openai/(types|resources)/|^google/"
)
"""Tests, vendored code and files whose docstrings repeat one another."""
