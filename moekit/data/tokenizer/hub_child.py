"""Fetches a tokenizer's files from the Hugging Face Hub, as a program of its own.

    python -m moekit.data.tokenizer.hub_child OWNER/NAME REVISION FOLDER

A program, because its time can be bounded whatever the network does, and because what the client would print is kept
off the terminal. It prints one JSON object: what it fetched, or which way it was refused. No token is ever in it.
"""

from __future__ import annotations

import fnmatch
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

PATTERNS = ("tokenizer*", "special_tokens_map.json", "config.json")
"""What Megatron and datatrove read of a tokenizer's repository (handbook 2.3)."""
MOST_BYTES = 512 << 20


def main(repository: str, revision: str, folder: str) -> None:
    """Print what came of it; see the module's text."""
    os.environ |= {"HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
    try:
        import huggingface_hub
    except ImportError:
        print(json.dumps({"refused": "package"}))
        return
    try:
        answer = _fetch(repository, revision or None, Path(folder))
    except Exception as reason:
        token = huggingface_hub.get_token()
        answer = {**_refusal(reason), "token": bool(token)}
        if token:
            answer["text"] = answer["text"].replace(token, "***")
    print(json.dumps(answer))


def _fetch(repository: str, revision: str | None, folder: Path) -> dict[str, Any]:
    from huggingface_hub import HfApi, constants, hf_hub_download

    info = HfApi().model_info(repository, revision=revision, files_metadata=True, timeout=constants.HF_HUB_ETAG_TIMEOUT)
    sizes = {file.rfilename: file.size or 0 for file in info.siblings or ()}
    wanted = sorted(name for name in sizes if is_wanted(name))
    if "tokenizer.json" not in wanted:
        return {"refused": "files", "text": ", ".join(wanted)}
    if sum(sizes[name] for name in wanted) > MOST_BYTES:
        return {"refused": "size", "text": f"{sum(sizes[name] for name in wanted):,}"}
    for name in wanted:
        hf_hub_download(repository, name, revision=info.sha, local_dir=folder)
    shutil.rmtree(folder / ".cache", ignore_errors=True)  # the client's own
    return {"commit": info.sha}


def is_wanted(name: str) -> bool:
    """Whether a file of a tokenizer's repository or folder is fetched."""
    return "/" not in name and any(fnmatch.fnmatchcase(name, pattern) for pattern in PATTERNS)


def _refusal(reason: BaseException) -> dict[str, Any]:
    """An exception of the client's, as one of few kinds and a text."""
    from huggingface_hub import errors

    text = " ".join(str(reason).split())
    if isinstance(reason, errors.GatedRepoError):
        return {"refused": "gated", "text": text}
    if isinstance(reason, errors.RepositoryNotFoundError):
        return {"refused": "absent", "text": text}
    if isinstance(reason, errors.RevisionNotFoundError):
        return {"refused": "revision", "text": text}
    if isinstance(reason, errors.HfHubHTTPError):
        return {"refused": "status", "status": reason.response.status_code, "text": text}
    if isinstance(reason, errors.OfflineModeIsEnabled):
        return {"refused": "offline", "text": text}
    if isinstance(reason, errors.HTTPError):  # type: ignore[attr-defined]  # httpx's, or its successor's
        return {"refused": "network", "text": text or type(reason).__name__}
    if reason.__cause__ is not None:  # the client's "look at your connection", for whatever went wrong
        return _refusal(reason.__cause__)
    if isinstance(reason, OSError) and reason.errno:
        return {"refused": "disk", "text": (reason.strerror or text).lower()}
    return {"refused": "answer", "text": f"{type(reason).__name__}: {text}"}


if __name__ == "__main__":
    main(*sys.argv[1:])
