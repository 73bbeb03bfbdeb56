"""Which of the GGUF models of a repository a tag means: `org/name:Q4_K_M`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from quire.config.gguf.files import gguf_files, is_beside, is_gguf
from quire.config.memory.plan import gib
from quire.errors import ModelNotFound, counted, shown
from quire.utils.lazy import nearest

DEFAULT_TAG = "Q4_K_M"
"""As in llama.cpp."""
MAX_LISTED = 40
"""Tags that a message lists."""
_TYPE = re.compile(
    r"(?<![^-._])(?:UD-)?(?:I?Q\d\w*|TQ\d_\d\w*|BF16|F16|F32|FP16|FP32|MXFP4\w*)(?![^-.])", re.IGNORECASE
)
_PART = re.compile(r"-\d{5}-of-\d{5}$")
_NOT_READ = re.compile(r"(?:UD-)?(?:IQ[123]|TQ)", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class RepositoryModel:
    """One GGUF model of a repository."""

    tag: str
    """Its quantisation as the file's name has it; all of the name where it has none."""
    files: tuple[str, ...]
    """Paths in the repository, of all parts in order."""
    num_bytes: int
    missing: int = 0
    """Parts that the repository lacks."""

    @property
    def name(self) -> str:
        """Of the first file, without folder, part and ending: a tag that means no other model."""
        return _stem(self.files[0])


def models_in(files: Mapping[str, int]) -> list[RepositoryModel]:
    """The GGUF models among files (path in the repository -> bytes), by their paths."""
    paths = sorted(path for path in files if is_gguf(Path(path)) and not is_beside(Path(path).name))
    firsts = dict.fromkeys(gguf_files(Path(path))[0] for path in paths)
    return [_model([part.as_posix() for part in gguf_files(first)], files) for first in firsts]


def _model(parts: Sequence[str], files: Mapping[str, int]) -> RepositoryModel:
    return RepositoryModel(
        tag=_tag(parts[0]),
        files=tuple(parts),
        num_bytes=sum(files.get(part, 0) for part in parts),
        missing=sum(part not in files for part in parts),
    )


def _stem(path: str) -> str:
    return _PART.sub("", Path(path).stem)


def _tag(path: str) -> str:
    """The last type that the file's name has, or its folder's."""
    places = (_stem(path), Path(path).parent.name)
    types = [type_ for place in places for type_ in reversed(_TYPE.findall(place))]
    return types[0] if types else _stem(path)


def choose(
    models: Sequence[RepositoryModel], tag: str | None, repository: str, memory: int
) -> tuple[RepositoryModel, str]:
    """(the model that a tag means, why). Without a tag: Q4_K_M, or the first that quire reads and that fits.

    Raises: ModelNotFound for a tag that no model has, or several.
    """
    found = find(models, tag or DEFAULT_TAG, repository)
    if found is not None:
        return _whole(found, repository), f"the tag {tag}" if tag else f"{DEFAULT_TAG} without a tag, as in llama.cpp"
    if tag is not None:
        hint = nearest(tag, [model.tag for model in models])
        raise ModelNotFound(f"{repository} has no GGUF model {shown(tag)}{hint or '.'} {listed(models)}")
    fitting = [model for model in models if not _NOT_READ.match(model.tag) and model.num_bytes < memory]
    if not fitting:
        raise ModelNotFound(
            f"{repository} has no {DEFAULT_TAG}, and none of its models of a type that quire reads fits {gib(memory)} "
            f"of memory. {listed(models)}"
        )
    return _whole(fitting[0], repository), (
        f"there is no {DEFAULT_TAG}, and it is the first of {counted(len(models), 'model')} that quire reads and that "
        f"fits {gib(memory)} of memory"
    )


def find(models: Sequence[RepositoryModel], tag: str, repository: str) -> RepositoryModel | None:
    """The model that a tag means, in any case: its type, an ending of that (`Q4_K_XL` of `UD-Q4_K_XL`), or its name.

    Raises: ModelNotFound where it means several.
    """
    wanted = tag.lower()
    by_name = [model for model in models if wanted in _names(model)]
    exact = by_name or [model for model in models if model.tag.lower() == wanted]
    found = exact or [model for model in models if model.tag.lower().endswith(f"-{wanted}")]
    if len(found) > 1:
        names = ", ".join(model.files[0].removesuffix(".gguf") for model in found[:MAX_LISTED])
        raise ModelNotFound(
            f"{repository}:{tag} means {counted(len(found), 'model')}: {names}. Give the name of one as the tag."
        )
    return found[0] if found else None


def _names(model: RepositoryModel) -> set[str]:
    """The names of a model but its type, in lower case."""
    path = model.files[0].lower()
    return {path, path.removesuffix(".gguf"), model.name.lower(), f"{model.name.lower()}.gguf"}


def listed(models: Sequence[RepositoryModel]) -> str:
    """The tags that there are, with their sizes, the smallest first."""
    tags = [f"{model.tag} ({gib(model.num_bytes)})" for model in sorted(models, key=lambda model: model.num_bytes)]
    rest = [f"and {len(tags) - MAX_LISTED} more"] if len(tags) > MAX_LISTED else []
    return f"There are {', '.join([*tags[:MAX_LISTED], *rest])}." if tags else "It has no GGUF files."


def _whole(model: RepositoryModel, repository: str) -> RepositoryModel:
    """Raises: ModelNotFound where parts are missing."""
    if model.missing:
        raise ModelNotFound(
            f"{repository}:{model.tag} is split into {counted(len(model.files), 'file')}, of which the repository "
            f"lacks {model.missing}. Choose another tag."
        )
    return model
