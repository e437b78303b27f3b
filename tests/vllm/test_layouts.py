"""Layouts read from vLLM's own cache tensors say where its own kernels put each token."""

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm import _custom_ops as ops
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    MLAAttentionSpec,
    compute_layout_strides,
    create_kv_cache_views,
)
from vllm.v1.kv_cache_layout import KVCacheLayout

from kvpush.core.errors import ConfigError
from kvpush.core.layout import Kind, Span, check_blocks, check_layout, first_difference
from kvpush.core.planner import Plan, plan
from kvpush.vllm.layouts import BlockSplit, CacheLayout, read_layout
from kvpush.vllm.ranks import Rank

HEADS, SIZE, LAYERS, TOKENS = 2, 64, 3, 400
_ONLY = Rank(0, 1, 0, 1)
_ISA = {32: "vec", 64: "vec", 128: "vec", 16: "vec16"}


class Engine:
    """vLLM's cache tensors of one engine, made as vLLM makes them, and a model configuration around them."""

    def __init__(
        self,
        block: int,
        order: KVCacheLayout = KVCacheLayout.LBHNC,
        backend: str = "CPU_ATTN",
        isa: str = "vec",
        kernel_block: int | None = None,
        heads: int = HEADS,
    ) -> None:
        self.block, self.blocks = block, 2 * TOKENS // block + 3
        spec = FullAttentionSpec(block_size=block, num_kv_heads=heads, head_size=SIZE, dtype=torch.float32)
        names = [f"layers.{i}.attn" for i in range(LAYERS)]
        layer_stride, block_stride = compute_layout_strides(spec, self.blocks, LAYERS, order)[:2]
        nbytes = spec.page_size_bytes * self.blocks * LAYERS
        place = KVCacheTensor(size=nbytes, layers=names, layer_stride=layer_stride, block_stride=block_stride)
        self.raw = torch.zeros(place.size, dtype=torch.int8)
        views = create_kv_cache_views(self.raw, spec, self.blocks, order, place, kernel_block)
        self.caches = dict(zip(names, views, strict=True))
        self.cache_config = KVCacheConfig(
            num_blocks=self.blocks, kv_cache_tensors=[place], kv_cache_groups=[KVCacheGroupSpec(names, spec)]
        )
        attention = SimpleNamespace(get_attn_backend=lambda: SimpleNamespace(get_name=lambda: backend), isa=isa)
        self.config = _config(dict.fromkeys(names, attention), HEADS)
        order_of_ids = torch.randperm(self.blocks, generator=torch.Generator().manual_seed(block)).tolist()
        self.ids = tuple(order_of_ids[: -(-TOKENS // block)])

    def read(self, rank: Rank = _ONLY) -> CacheLayout:
        """The layout, checked as a peer would."""
        cache = read_layout(self.caches, self.cache_config, self.config, rank, "m")
        check_layout(cache.layout)
        return cache

    def slots(self) -> torch.Tensor:
        """The cache slot of each token."""
        return torch.tensor([self.ids[t // self.block] * self.block + t % self.block for t in range(TOKENS)])


def _config(modules: dict[str, Any], heads: int) -> Any:
    return SimpleNamespace(
        compilation_config=SimpleNamespace(static_forward_context=modules),
        model_config=SimpleNamespace(get_total_num_kv_heads=lambda: heads),
    )


def _keys_and_values() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    key, value = torch.randn(2, TOKENS, HEADS, SIZE, generator=generator)
    return key, value


def _write_with_kernel(engine: Engine, tokens: slice) -> None:
    """Fill these tokens' cache as the model's forward pass does on a CPU."""
    current_platform.import_kernels()
    key, value = _keys_and_values()
    for index, cache in enumerate(engine.caches.values()):
        blocks, heads, block, _ = cache.shape
        keys, values = cache.view(blocks, heads, block * 2, -1).chunk(2, dim=2)
        ops.cpu_attn_reshape_and_cache(
            (key + index)[tokens],
            (value - index)[tokens],
            keys,
            values,
            engine.slots()[tokens],
            _ISA[engine.block],
            k_scale=1.0,
            v_scale=1.0,
            kv_cache_dtype="auto",
        )


def _carry_out(copies: Plan) -> None:
    for source, target, nbytes in zip(
        copies.local.tolist(), copies.remote.tolist(), copies.nbytes.tolist(), strict=True
    ):
        ctypes.memmove(target, source, nbytes)


def _push(sender: Engine, receiver: Engine, span: Span) -> Plan:
    ours, theirs = sender.read(), receiver.read()
    assert first_difference(ours.layout, theirs.layout) is None
    mine = ours.expand((sender.ids[: -(-span.end // sender.block)],), Span(0, span.end))
    their_ids = (receiver.ids[span.start // receiver.block : -(-span.end // receiver.block)],)
    theirs_expanded = theirs.expand(their_ids, span)
    check_blocks(theirs.layout, span, theirs_expanded)
    copies = plan(span, ours.layout, mine, 0, theirs.layout, theirs_expanded, span.start)
    _carry_out(copies)
    return copies


@pytest.mark.parametrize("start", [0, 128, 256])
@pytest.mark.parametrize(("mine", "theirs"), [(32, 32), (16, 16), (16, 128), (32, 128), (128, 32), (128, 128)])
def test_pushed_tokens_are_where_the_receivers_own_kernel_would_have_put_them(
    mine: int, theirs: int, start: int
) -> None:
    sender, receiver, wanted = Engine(mine), Engine(theirs), Engine(theirs)
    _write_with_kernel(sender, slice(0, TOKENS))
    _write_with_kernel(receiver, slice(0, start))
    _write_with_kernel(wanted, slice(0, TOKENS))

    _push(sender, receiver, Span(start, TOKENS))

    for name, cache in receiver.caches.items():
        assert torch.equal(cache, wanted.caches[name]), name


def test_equal_blocks_are_pushed_whole() -> None:
    sender, receiver = Engine(128), Engine(128)

    copies = _push(sender, receiver, Span(0, TOKENS))

    assert copies.descriptors <= LAYERS * len(sender.ids)


@pytest.mark.parametrize("mine", list(KVCacheLayout))
@pytest.mark.parametrize("theirs", [KVCacheLayout.LBHNC, KVCacheLayout.LBNHC])
def test_pushed_tokens_are_the_same_in_any_order_of_heads_and_tokens(
    mine: KVCacheLayout, theirs: KVCacheLayout
) -> None:
    sender, receiver = Engine(32, mine, "FLASH_ATTN"), Engine(64, theirs, "TRITON_ATTN")
    for index, cache in enumerate(sender.caches.values()):
        values = torch.arange(cache.numel(), dtype=torch.float32).reshape(cache.shape)
        cache.copy_(values + 1000 * index)

    _push(sender, receiver, Span(64, TOKENS))

    assert {plane.kind for plane in sender.read().layout.planes} == {Kind.PAIR}
    for name, cache in sender.caches.items():
        ours, theirs_ = _by_token(cache, sender), _by_token(receiver.caches[name], receiver)
        assert torch.equal(ours[64:], theirs_[64:]), name
        assert not theirs_[:64].any(), "what the receiver had was touched"


def _by_token(cache: torch.Tensor, engine: Engine) -> torch.Tensor:
    """The cache as (tokens, heads, content)."""
    return torch.stack([cache[engine.ids[t // engine.block], :, t % engine.block] for t in range(TOKENS)])


@pytest.mark.parametrize("start", [0, 64, 128, 192])
def test_scheduler_blocks_made_of_smaller_kernel_blocks_are_pushed_right(start: int) -> None:
    sender = Engine(64, KVCacheLayout.LBHNC, "FLASH_ATTN", kernel_block=16)
    receiver = Engine(64, KVCacheLayout.LBHNC, "FLASH_ATTN")
    for cache in sender.caches.values():
        cache.copy_(torch.arange(cache.numel(), dtype=torch.float32).reshape(cache.shape))

    _push(sender, receiver, Span(start, TOKENS))

    assert sender.read().splits == (BlockSplit(16, 4),)
    for name, cache in sender.caches.items():
        got = _by_token(receiver.caches[name], receiver)
        for t in range(start, TOKENS):
            kernel_block = sender.ids[t // 64] * 4 + t % 64 // 16
            assert torch.equal(got[t], cache[kernel_block, :, t % 16])


def test_span_that_begins_inside_of_a_scheduler_block_skips_the_kernel_blocks_before_it() -> None:
    split = BlockSplit(block_size=16, ratio=4)

    assert split.expand((5, 9), Span(32, 100)) == (22, 23, 36, 37, 38)


def test_blocks_of_unknown_inner_order_are_only_copied_whole() -> None:
    ours, theirs = Engine(64, isa="amx").read(), Engine(128, isa="amx").read()

    difference = first_difference(ours.layout, theirs.layout)

    assert difference is not None
    assert "can only be copied whole" in str(difference)
    assert first_difference(ours.layout, Engine(64, isa="amx").read().layout) is None
    assert first_difference(ours.layout, Engine(64, isa="neon").read().layout) is not None


def test_rank_of_several_holds_its_share_of_the_heads() -> None:
    layout = Engine(32, heads=1).read(Rank(1, 2, 1, 2)).layout

    assert (layout.total_heads, layout.head_start, layout.head_end, layout.tp_rank, layout.tp_size) == (2, 1, 2, 1, 2)


def test_ranks_that_share_a_head_hold_the_same_one() -> None:
    layouts = [Engine(32, heads=1).read(Rank(number, 4, number, 4)).layout for number in range(4)]

    assert [(each.head_start, each.head_end) for each in layouts] == [(0, 1), (0, 1), (1, 2), (1, 2)]


def test_latents_are_one_head_whatever_the_rank() -> None:
    engine = Engine(32, backend="FLASHMLA", heads=1)
    spec = MLAAttentionSpec(block_size=32, num_kv_heads=1, head_size=2 * SIZE, dtype=torch.float32)
    engine.cache_config.kv_cache_groups[0] = KVCacheGroupSpec(list(engine.caches), spec)

    layout = engine.read(Rank(1, 2, 1, 2)).layout

    assert (layout.total_heads, layout.head_start, layout.head_end) == (1, 0, 1)
    assert {plane.kind for plane in layout.planes} == {Kind.LATENT}
    assert layout.head_bytes == 2 * SIZE * 4


def test_cache_that_is_no_attention_cache_stops_the_start_with_its_name() -> None:
    engine = Engine(32)
    engine.caches["layers.1.attn"] = torch.zeros(4, 4)

    with pytest.raises(ConfigError, match=r"layers\.1\.attn"):
        engine.read()


def test_more_head_slots_than_the_model_has_heads_stop_the_start() -> None:
    with pytest.raises(ConfigError, match="keeps 4 heads where the model has 2"):
        Engine(32, backend="FLASHINFER", heads=4).read()
