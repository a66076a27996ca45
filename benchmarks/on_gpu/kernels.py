"""Each kernel of specdec_kernels.gpu beside its reference in torch, and beside the limits of the device."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any

import torch

from on_gpu.kernel_cases import CASES, Case, Operation
from on_gpu.limits import Limits, limits_row, measure_limits
from on_gpu.setup import Rows, Setup
from on_gpu.timing import attempt, seconds_of
from specdec_core.ops import REFERENCE

COLUMNS = ("us", "reference_us", "speed_up", "limit_us", "share_of_limit", "bound", "relative_error", "different")
AT_ONCE = 2**24
"""Numbers that are compared together."""
TOLERANCES = {torch.bfloat16: 2**-7, torch.float32: 1e-4}
"""The largest relative error of a kernel by the dtype of its result. Kernel and reference each round to bfloat16, by up
to 2**-9 of a number, and some references round in between. Whole numbers, and what is only moved, must be equal."""


def kernels(device: str) -> Mapping[str, Operation]:
    """The operations of specdec_kernels.gpu: on a CPU in Triton's interpreter. Without Triton there are none."""
    if find_spec("triton") is None:
        return {}
    if device == "cpu":
        os.environ.setdefault("TRITON_INTERPRET", "1")  # before triton is imported
    from specdec_kernels import gpu

    return gpu.OPS


def rows(setup: Setup) -> Rows:
    found = kernels(setup.device)
    limits = measure_limits(setup)
    yield {"operation": "limits of the device", **limits_row(limits)}
    yield {"operation": "without a case", "names": without_case(found)}
    for name, cases in CASES.items():
        for case in cases(setup.sizes, setup.device):
            row = {"operation": name, **case.sizes}
            if setup.is_done(row):
                continue
            yield attempt(setup, row, lambda name=name, case=case: measure(name, case, found.get(name), limits, setup))


def without_case(operations: Mapping[str, Operation]) -> list[str]:
    return sorted(operations.keys() - CASES.keys())


@torch.inference_mode()
def measure(name: str, case: Case, kernel: Operation | None, limits: Limits, setup: Setup) -> dict[str, Any]:
    """Compare a kernel with its reference, and time both. kernel: None: the reference alone is timed."""
    torch.manual_seed(0)
    bind, device, cell_s = case.bind(), setup.device, setup.sizes.cell_s
    reference = bind(REFERENCE[name])
    reference_s = seconds_of(reference, device, cell_s)
    least = limits.seconds(case.num_bytes, case.num_flops)
    found = {
        "reference_us": _us(reference_s),
        "limit_us": _us(least),
        "bound": limits.bound(case.num_bytes, case.num_flops),
    }
    if kernel is None:
        return found
    bound = bind(kernel)
    compared = compare(_tensors(bound()), _tensors(reference()), case.tolerance)
    seconds = seconds_of(bound, device, cell_s)
    return {
        **found,
        "us": _us(seconds),
        "speed_up": round(reference_s / seconds, 3),
        "share_of_limit": round(least / seconds, 4),
        **compared,
    }


def compare(
    found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor], tolerance: float | None = None
) -> dict[str, Any]:
    """Compare what a kernel returned with what its reference did.

    tolerance: the largest relative error that is allowed; None: that of the dtype (TOLERANCES).
    relative_error: the largest difference of numbers that are finite in both, as a share of the largest number.
    different: the share of entries of which one is finite, that are infinities of different signs, that are NaN in
        either, or that are whole numbers and not equal.
    error: what is not as it must be. Without one it is left out.
    """
    kinds = [[(tuple(each.shape), each.dtype) for each in tensors] for tensors in (found, expected)]
    if kinds[0] != kinds[1]:
        return {"error": f"shapes and dtypes {kinds[0]} are not those of the reference, {kinds[1]}"}
    worst, num_different, faults = 0.0, 0, []
    for ours, theirs in zip(found, expected, strict=True):
        error, number = _compare(ours, theirs)
        allowed = TOLERANCES.get(theirs.dtype, 0.0) if tolerance is None else tolerance
        worst, num_different = max(worst, error), num_different + number
        if error > allowed:
            faults.append(f"the relative error {error:.3g} is more than {allowed:.3g}")
        if number:
            faults.append(f"{number} of {theirs.numel()} entries are different or NaN")
    num_entries = sum(each.numel() for each in expected)
    compared = {"relative_error": worst, "different": num_different / max(1, num_entries)}
    return {**compared, "error": "; ".join(faults)} if faults else compared


def _compare(whole_found: torch.Tensor, whole_expected: torch.Tensor) -> tuple[float, int]:
    """Return the relative error, and the number of different entries."""
    if not whole_expected.is_floating_point():
        return 0.0, int((whole_found != whole_expected).sum())
    num_different, largest, difference = 0, 0.0, 0.0
    parts = (each.flatten().split(AT_ONCE) for each in (whole_found, whole_expected))
    for ours, theirs in zip(*parts, strict=True):
        if not theirs.numel():
            continue
        is_finite = ours.isfinite() & theirs.isfinite()
        num_different += int((~is_finite & (ours != theirs)).sum())  # NaN is not equal to itself
        largest = max(largest, float(torch.where(is_finite, theirs, 0).abs().max()))
        difference = max(difference, float(torch.where(is_finite, ours.double() - theirs.double(), 0).abs().max()))
    return difference / largest if largest else difference, num_different


def _tensors(result: Any) -> list[torch.Tensor]:
    return list(result) if isinstance(result, tuple) else [result]


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 3)
