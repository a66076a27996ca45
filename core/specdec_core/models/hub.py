"""What is no folder here is looked for on the model hub. Whether it can be is found out without waiting for long."""

from __future__ import annotations

from os.path import exists

from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
from huggingface_hub.errors import FileMetadataError, HfHubHTTPError, HFValidationError

from specdec_core.errors import reason


def require(name: str, *file_names: str, revision: str | None = None) -> None:
    """Raises FileNotFoundError if a checkpoint is no folder, and `unreachable`."""
    if why := unreachable(name, *file_names, revision=revision):
        raise FileNotFoundError(f"there is no such folder, and {why}")


def unreachable(name: str, *file_names: str, revision: str | None = None) -> str | None:
    """Why a checkpoint that is no folder cannot be had from the model hub either; None if it may be: one of the files
    was downloaded before, or the hub answers, whatever it says about the first of them.

    The hub is asked once. What downloads a file tries again for half a minute where there is no connection.
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
