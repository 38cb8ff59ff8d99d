"""The slots of tokens, sorted by a bundle's kernel (here its stand-in in host memory) or by torch: the same."""

from __future__ import annotations

import pytest
import torch
from emulated_kernels import bundle_of, variant_and_code
from host_gpu import Device

from pretuned.artifacts.codec import encode
from pretuned.artifacts.records import DType, RowOp
from pretuned.kernels.rowops import MOST_SORTED_EXPERTS, RowOpSpec
from pretuned.runtime import sort_routing
from pretuned.runtime.ops import routing


def same(ids: torch.Tensor, E: int, device: Device, launches: int) -> None:
    device.launches.clear()
    by_kernel = sort_routing(ids, E)
    assert len(device.sorted) == launches
    device.visible = False
    by_torch = sort_routing(ids, E)
    assert len(device.sorted) == launches
    device.visible = True
    for name, tensor in by_kernel._asdict().items():
        other = getattr(by_torch, name)
        assert (tensor.dtype, tensor.shape) == (other.dtype, other.shape), name
        assert torch.equal(tensor, other), name


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize(("T", "k", "launches"), [(1, 1, 1), (1, 5, 1), (2, 3, 3), (40, 2, 3)])
@pytest.mark.parametrize("E", [1, 7, 200])
def test_kernel_and_torch_agree(
    T: int,
    k: int,
    launches: int,
    E: int,
    dtype: torch.dtype,
    device: Device,
) -> None:
    generator = torch.Generator().manual_seed(T + E)
    ids = torch.randint(-2, E + 2, (T, k), generator=generator, dtype=dtype)
    same(ids, E, device, launches)
    same(ids.repeat_interleave(3, 0)[::3], E, device, launches)  # not dense
    same(torch.full_like(ids, E), E, device, launches)  # nobody here


def test_an_int64_id_whose_low_word_is_an_experts_is_none(device: Device) -> None:
    ids = torch.tensor([[2**32 + 1, 1], [-(2**32), 0]])
    same(ids, 2, device, 1)
    assert sort_routing(ids, 2).m_sizes.tolist() == [1, 1]


class Sort(torch.nn.Module):
    def forward(self, ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(sort_routing(ids, 4))


def by_torch(ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return Sort()(ids[ids[:, 0] >= 0])


@pytest.mark.parametrize("strict", [True, False])
def test_any_number_of_tokens_is_exported(device: Device, strict: bool) -> None:
    device.available = False
    module, other = Sort(), torch.randint(0, 4, (9, 2))
    dynamic = [{0: torch.export.Dim("T")}]
    exported = torch.export.export(module, (torch.randint(0, 4, (3, 2)),), dynamic_shapes=dynamic, strict=strict)
    for ids in (other, other[:1]):
        for got, want in zip(exported.module()(ids), module(ids), strict=True):
            assert torch.equal(got, want)


def test_a_number_of_tokens_that_nobody_knows_is_compiled(device: Device) -> None:
    device.available = False
    torch._dynamo.reset()
    ids = torch.randint(-1, 4, (50, 2))
    for got, want in zip(torch.compile(by_torch, fullgraph=True, backend="eager")(ids), by_torch(ids), strict=True):
        assert torch.equal(got, want)


def test_what_traces_a_call_sees_torchs_operations(device: Device) -> None:
    from torch.fx.experimental.proxy_tensor import make_fx

    ids = torch.randint(0, 4, (5, 2))
    device.launches.clear()
    graph = make_fx(Sort())(ids)
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
        sort_routing(ids, 4)
    assert not device.sorted
    for got, want in zip(graph(ids.flip(0)), sort_routing(ids.flip(0), 4), strict=True):
        assert torch.equal(got, want)


def test_a_variant_for_fewer_experts_is_left_alone(device: Device) -> None:
    device.publish(encode(bundle_of([variant_and_code(RowOpSpec(RowOp.SORT_SLOTS, DType.FP32, 1), max_experts=7)])))
    ids = torch.tensor([[0, 1]])
    assert routing.sort_slots(ids, 7) is not None
    assert routing.sort_slots(ids, 8) is None


def test_without_the_kernel_torch_sorts(device: Device) -> None:
    device.there -= {RowOp.SORT_SLOTS}
    assert sort_routing(torch.tensor([[1, 0], [1, 2]]), 3).m_sizes.tolist() == [1, 2, 1]
    assert not device.sorted


@pytest.mark.filterwarnings("ignore:torch.searchsorted")  # of a batch: torch's own remark
def test_what_the_kernel_can_not_do_is_left_to_torch(device: Device) -> None:
    ids = torch.tensor([[0, 1]])
    assert routing.sort_slots(ids, MOST_SORTED_EXPERTS) is not None
    assert routing.sort_slots(ids, MOST_SORTED_EXPERTS + 1) is None
    assert routing.sort_slots(ids, 0) is None
    assert routing.sort_slots(ids.to(torch.int16), 2) is None
    assert routing.sort_slots(ids[:0], 2) is None
    assert routing.sort_slots(torch.nn.Parameter(ids, requires_grad=False), 2) is None  # a tensor of another kind
    torch.func.vmap(lambda tensor: sort_routing(tensor, 2).m_sizes)(torch.stack([ids, ids]))
    same(ids.to(torch.uint8), 2, device, 0)
    assert sort_routing(torch.tensor([[2**32, 1]], dtype=torch.uint64), 2).m_sizes.tolist() == [0, 1]
