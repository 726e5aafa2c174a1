"""A tokenizer's files from the Hugging Face Hub, in bounded time, and in plain words where it refuses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from moekit.lifeline import die_with_parent
from moekit.problems import MoekitError, error, shortened
from moekit.share import program

MOST_SECONDS = 300
"""All that fetching may take; the client itself gives up after 10 s without an answer."""
LOCAL = "where there is no network, `--from DIR` takes a local folder that has its files"


def fetch_from_hub(repository: str, revision: str | None, copy: str | None, folder: Path) -> str:
    """Put the tokenizer's files of a repository into a folder, and return the commit they are of.

    Args:
        repository: `OWNER/NAME`.
        revision: a branch, tag or commit; None: the newest.
        copy: a repository with the same tokenizer to name where this one refuses.
        folder: an existing folder.

    Raises:
        MoekitError: says what refused it and what can be done.
    """
    command = [sys.executable, "-m", "moekit.data.tokenizer.hub_child", repository, revision or "", str(folder)]
    try:
        done = subprocess.run(
            command, capture_output=True, timeout=MOST_SECONDS, preexec_fn=die_with_parent, stdin=subprocess.DEVNULL
        )
    except subprocess.TimeoutExpired:
        what = f"{_host()} did not send `{repository}` within {MOST_SECONDS} s"
        raise error(what, f"try again later; {LOCAL}") from None
    if done.returncode or not done.stdout:  # nothing of its output is shown: a token might be in it
        raise error(f"fetching `{repository}` ended with code {done.returncode}", f"try again; {LOCAL}")
    answer = json.loads(done.stdout)
    if "refused" in answer:
        raise _refused(answer, repository, revision, copy)
    return str(answer["commit"])


def _host() -> str:
    """Who is asked, without what an address may hold besides."""
    address = os.environ.get("HF_ENDPOINT") or "https://huggingface.co"
    return urlsplit(address).netloc.rpartition("@")[2] or shortened(address)


def _refused(answer: dict[str, Any], repository: str, revision: str | None, copy: str | None) -> MoekitError:
    host, text = _host(), shortened(answer.get("text", ""))
    from_copy = f"`--from {copy}` takes the copy that asks for no permission" if copy and copy != repository else ""
    login = f"`{program('hf')} auth login`"
    match answer["refused"]:
        case "package":
            return error("fetching a tokenizer needs `huggingface_hub`", "run `pip install 'moekit[data]'`")
        case "gated":
            who = "your account has no access to it" if answer["token"] else "you are not logged in"
            steps = f"ask for access on its page there{'' if answer['token'] else f', then {login}'}"
            hint = f"{steps}; or {from_copy}" if from_copy else steps
            return error(f"`{repository}` is gated on {host}, and {who}", hint)
        case "absent":
            hint = f"look for a slip in the name; {login} where it is private"
            return error(f"{host} has no repository `{repository}`, or none that you may see", hint)
        case "revision":
            return error(f"`{repository}` has no revision `{shortened(revision or '')}`", "look for a slip in the name")
        case "files":
            has = f": it has {text}" if text else ""
            hint = "only fast tokenizers have one: take a repository that does"
            return error(f"`{repository}` has no `tokenizer.json`{has}", hint)
        case "size":
            return error(f"the tokenizer of `{repository}` has {text} bytes, too many for one", "is it the right one?")
        case "status" if answer["status"] == 401:
            hint = f"{login} sets another one; the variable HF_TOKEN, where it is set, comes first"
            return error(f"{host} does not take your token", hint)
        case "status":
            return error(
                f"{host} answers with status {answer['status']} to `{repository}`", f"try again later; {LOCAL}"
            )
        case "offline":
            return error("the variable HF_HUB_OFFLINE forbids to fetch anything", f"unset it; {LOCAL}")
        case "network":
            return error(f"{host} cannot be reached: {text}", LOCAL)
        case "disk":
            return error(f"`{repository}` cannot be written: {text}")
        case _:
            return error(f"the answer of {host} is none of the Hub's: {text}", f"look at HF_ENDPOINT; {LOCAL}")
