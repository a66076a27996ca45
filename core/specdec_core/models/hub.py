"""Finds out quickly whether a checkpoint may be available from the model hub (Hugging Face)."""

from __future__ import annotations

from os.path import exists, isfile

from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
from huggingface_hub.errors import FileMetadataError, HfHubHTTPError, HFValidationError

from specdec_core.errors import reason


def require(name: str, *file_names: str, revision: str | None = None) -> None:
    """Raise FileNotFoundError if a checkpoint is neither a folder nor available from the model hub, NotADirectoryError
    if it is a file.

    name: a folder, or a name on the model hub.
    file_names: the checkpoint has at least one of these files.
    """
    if isfile(name):
        raise NotADirectoryError("it is a file")
    if why := unreachable(name, *file_names, revision=revision):
        raise FileNotFoundError(f"there is no such folder, and {why}")


def unreachable(name: str, *file_names: str, revision: str | None = None) -> str | None:
    """Return the reason why the model hub cannot provide a checkpoint, as a text for errors, or None.

    The hub is not asked if `name` is a path that exists, or if one of the files is in the local cache. Otherwise, one
    request for the first of the files is sent. Any answer of the hub, even an error, counts as success. Trying
    a download instead would take half a minute without a connection, because downloads are retried.
    """
    if exists(name):
        return None
    try:
        url = hf_hub_url(name, file_names[0], revision=revision)
    except HFValidationError:
        return "no repository of the model hub can be called that"
    if any(try_to_load_from_cache(name, file_name, revision=revision) is not None for file_name in file_names):
        return None
    try:
        get_hf_file_metadata(url, timeout=constants.HF_HUB_ETAG_TIMEOUT)
    except (HfHubHTTPError, FileMetadataError):
        return None  # it answers: what is wrong is told to who downloads
    except Exception as error:  # whatever the library for HTTP raises where there is no connection
        return f"the model hub cannot be reached: {reason(error)}"
    return None
