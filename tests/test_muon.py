import pytest
import torch
from torch.optim import _muon

from specmill import compat
from specmill.muon import orthogonalised, without_emulation

COEFFICIENTS = (3.4445, -4.7750, 2.0315)


@pytest.mark.parametrize("shape", [(8, 24), (24, 8), (16, 16)])
def test_singular_values_come_near_one_and_directions_stay(shape: tuple[int, int]) -> None:
    grad = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    found = orthogonalised(grad, COEFFICIENTS, 5, 1e-7)
    left, _, right = torch.linalg.svd(grad, full_matrices=False)
    values = (left.T @ found @ right.T).diagonal()
    assert ((values > 0.5) & (values < 1.3)).all()
    assert torch.allclose(left @ torch.diag(values) @ right, found, atol=1e-4)


def test_it_is_what_torch_computes_up_to_its_rounding() -> None:
    grad = torch.randn((12, 20), generator=torch.Generator().manual_seed(2))
    theirs = _muon._zeropower_via_newtonschulz(grad, COEFFICIENTS, 5, 1e-7)
    ours = orthogonalised(grad, COEFFICIENTS, 5, 1e-7)
    assert ours.dtype == torch.float32
    assert (theirs.float() - ours).abs().max() < 0.05


@pytest.mark.parametrize(("native", "is_ours"), [(False, True), (True, False)])
def test_torch_is_left_alone_where_the_cpu_computes_in_bfloat16(
    monkeypatch: pytest.MonkeyPatch, native: bool, is_ours: bool
) -> None:
    monkeypatch.setattr(compat, "device", lambda: "cpu")
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: native)
    before = _muon._zeropower_via_newtonschulz
    with without_emulation():
        assert (_muon._zeropower_via_newtonschulz is orthogonalised) == is_ours
    assert _muon._zeropower_via_newtonschulz is before
