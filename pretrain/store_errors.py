"""What the errors of object stores mean: whether waiting may help, and what to tell the user."""

from __future__ import annotations

import re

from pretrain.errors import FULL, DataError, install_command, without_secrets

_PACKAGES = {
    "s3": "s3fs",
    "s3a": "s3fs",
    "gs": "gcsfs",
    "gcs": "gcsfs",
    "hf": "huggingface_hub",
    "http": "aiohttp",
    "https": "aiohttp",
}
_DEFECTS = (TypeError, AttributeError, NameError, AssertionError, MemoryError)
_FINAL = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError, NotImplementedError, ValueError)
_OFFLINE = {"OfflineModeIsEnabled"}
_NO_CREDENTIALS = {
    "NoCredentialsError",
    "PartialCredentialsError",
    "DefaultCredentialsError",
    "ProfileNotFound",
    "LocalTokenNotFoundError",
}


class PassingError(DataError):
    """A failure of a server or a network that may pass, so another attempt is made."""


class WrongContentError(DataError):
    """The bytes that arrived, again and again, are not those of the manifest. `found`: what arrived, for another message."""

    found = ""


def protocol_of(url: str) -> str:
    """The first protocol of a URL, `s3` for instance."""
    return re.split("::|://", url, maxsplit=1)[0].lower()


def judged(url: str, error: BaseException, done: str = "read") -> BaseException:
    """The error to raise for a backend's error: PassingError if waiting may help, else DataError. `done`: what was to be done to the file."""
    status = _status(error)
    what = " ".join(f"{type(error).__name__}: {error}".split())[:300]
    what = what.replace(url, without_secrets(url))
    if isinstance(error, ImportError):
        package = _PACKAGES.get(protocol_of(url))
        if package is None:  # fsspec names it
            return DataError(f"{without_secrets(url)}: {protocol_of(url)}:// needs a package that is not installed: {error}")
        return DataError(
            f"{without_secrets(url)}: {protocol_of(url)}:// needs the package {package}, which is not installed; "
            f"run {install_command('remote')}"
        )
    if isinstance(error, (FileNotFoundError, NotADirectoryError)) or status in (404, 410):
        return FileNotFoundError(f"{without_secrets(url)}: not found; check the URL, and whether the upload was complete")
    if isinstance(error, PermissionError) or status in (401, 403) or type(error).__name__ in _NO_CREDENTIALS:
        return DataError(
            f"{without_secrets(url)}: access refused ({what}); set the credentials in the environment "
            "(AWS_ACCESS_KEY_ID, GOOGLE_APPLICATION_CREDENTIALS, HF_TOKEN, ...), see docs/data.md"
        )
    if isinstance(error, _DEFECTS) or not isinstance(error, Exception):
        return error
    if isinstance(error, OSError) and error.errno in FULL:
        return DataError(f"{without_secrets(url)}: cannot be {done} ({error.strerror}); make room there")
    if isinstance(error, _FINAL) or type(error).__name__ in _OFFLINE or (400 <= status < 500 and status not in (408, 425, 429)):
        return DataError(f"{without_secrets(url)}: cannot be {done} ({what}); check the URL")
    return PassingError(f"{without_secrets(url)}: {what}")


def _status(error: BaseException) -> int:
    """The HTTP status behind an error of aiohttp, gcsfs, httpx or requests; 0 without one."""
    response = getattr(error, "response", None)
    for status in (getattr(error, "status", None), getattr(error, "code", None), getattr(response, "status_code", None)):
        if isinstance(status, int) and 100 <= status < 600:
            return status
    return 0
