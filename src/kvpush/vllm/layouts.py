"""Reads the KV cache tensors of a vLLM worker into a `Layout`.

vLLM hands out each layer's cache as a tensor of logical shape (blocks, heads, tokens, content), whatever the
order in memory is: that is in the strides, which are read here. What one token's content looks like is
up to the attention backend:

    FLASH_ATTN, TRITON_ATTN, ...  key and value side by side: one plane of pairs
    MLA backends                  one latent
    CPU_ATTN, float kernels       a head's block is all keys, column by column, then all values, row by row
    anything else                 not known: only whole blocks can be copied (`packing`)

A backend may use smaller blocks than vLLM's scheduler does. Then the layout's blocks are the backend's, and
`BlockSplit` turns the scheduler's ids into theirs.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheConfig, MLAAttentionSpec, UniformTypeKVCacheSpecs

from kvpush.core.errors import ConfigError
from kvpush.core.layout import Blocks, Group, Kind, Layout, Plane, Region, Span
from kvpush.vllm.ranks import Rank

_PAIRS_BY_TOKEN = frozenset({"FLASH_ATTN", "TRITON_ATTN", "FLEX_ATTENTION", "FLASHINFER"})
_LATENTS_BY_TOKEN = frozenset({"TRITON_MLA", "FLASHMLA", "FLASH_ATTN_MLA", "CUTLASS_MLA", "FLASHINFER_MLA"})
_KEYS_BY_COLUMN = frozenset({"vec", "vec16"})
"""CPU_ATTN's portable kernels; the others (amx, neon, ...) interleave tokens in ways of their own."""

_NOT_IN_FINGERPRINT = ("_name_or_path", "transformers_version", "torch_dtype", "dtype")
_NO_HYBRID = "Only models whose layers all have plain attention caches can be served."


@dataclass(frozen=True)
class BlockSplit:
    """How one scheduler block of a group is made of the backend's: `ratio` of them, `block_size` tokens each."""

    block_size: int
    ratio: int

    def expand(self, ids: tuple[int, ...], span: Span) -> tuple[int, ...]:
        """The backend's block ids that hold `span`, from the scheduler's that do."""
        if self.ratio == 1:
            return ids
        ours = [block * self.ratio + part for block in ids for part in range(self.ratio)]
        skipped = span.start // self.block_size % self.ratio
        count = -(-span.end // self.block_size) - span.start // self.block_size
        return tuple(ours[skipped : skipped + count])


@dataclass(frozen=True)
class CacheLayout:
    """A rank's layout, and how the scheduler's block ids become the layout's."""

    layout: Layout
    splits: tuple[BlockSplit, ...]

    def expand(self, blocks: Blocks, span: Span) -> Blocks:
        """Block ids of all groups, as the layout counts them."""
        return tuple(split.expand(ids, span) for split, ids in zip(self.splits, blocks, strict=True))


@dataclass(frozen=True)
class _Layer:
    """One layer's cache: a tensor of shape (blocks, heads, tokens, content) and who attends to it."""

    name: str
    group: int
    cache: torch.Tensor
    spec: AttentionSpec
    backend: str
    isa: str

    def bytes_along(self, axis: int) -> int:
        return int(self.cache.stride(axis) * self.cache.element_size())

    @property
    def content_bytes(self) -> int:
        return int(self.cache.shape[3] * self.cache.element_size())

    @property
    def planes(self) -> tuple[Plane, ...]:
        if self.backend == "CPU_ATTN" and self.isa in _KEYS_BY_COLUMN:
            return self._keys_by_column()
        if isinstance(self.spec, MLAAttentionSpec):
            return (self._plane(Kind.LATENT, "" if self.backend in _LATENTS_BY_TOKEN else self.backend),)
        packing = "" if self.backend in _PAIRS_BY_TOKEN else f"{self.backend} {self.isa}".strip()
        return (self._plane(Kind.PAIR, packing),)

    def _plane(self, kind: Kind, packing: str) -> Plane:
        strides = (self.bytes_along(0), self.bytes_along(1), self.bytes_along(2))
        return Plane(self.name, kind, self.group, self.cache.data_ptr(), *strides, packing=packing)

    def _keys_by_column(self) -> tuple[Plane, ...]:
        """A head's block holds keys as (dimension, token), then values as (token, dimension)."""
        tokens, item, key_bytes = int(self.cache.shape[2]), self.cache.element_size(), self.content_bytes // 2
        if self.bytes_along(2) != self.content_bytes:
            raise _unsupported(self.name, f"tokens are {self.bytes_along(2)} bytes apart, not {self.content_bytes}")
        base, block, head = self.cache.data_ptr(), self.bytes_along(0), self.bytes_along(1)
        lanes = key_bytes // item
        keys = Plane(self.name, Kind.KEY, self.group, base, block, head, item, lanes, tokens * item)
        values = Plane(self.name, Kind.VALUE, self.group, base + tokens * key_bytes, block, head, key_bytes)
        return keys, values

    @property
    def head_bytes(self) -> int:
        """Bytes of one head of one token in one of this layer's planes."""
        return self.content_bytes // len(self.planes)


def read_layout(
    kv_caches: Mapping[str, torch.Tensor], cache_config: KVCacheConfig, config: VllmConfig, rank: Rank, model: str
) -> CacheLayout:
    """The layout of one rank. `model` "" takes a fingerprint of the model's configuration.

    Raises `ConfigError` for caches that a `Layout` cannot describe (state-space layers, unequal head counts).
    """
    layers = tuple(_layers(kv_caches, cache_config, config))
    head_bytes = _common(layers, "bytes per head", [layer.head_bytes for layer in layers])
    heads = _common(layers, "head count", [int(layer.cache.shape[1]) for layer in layers])
    total, start = _heads(config, layers, heads, rank)
    splits = tuple(_split(layers, index, group, cache_config.num_blocks) for index, group in _groups(cache_config))
    layout = Layout(
        model=model or fingerprint(config),
        dtype=str(layers[0].cache.dtype).removeprefix("torch."),
        head_bytes=head_bytes,
        total_heads=total,
        head_start=start,
        head_end=start + heads,
        tp_rank=rank.number,
        tp_size=rank.count,
        memory="dram" if layers[0].cache.device.type == "cpu" else "vram",
        groups=tuple(Group(split.block_size, cache_config.num_blocks * split.ratio) for split in splits),
        planes=tuple(plane for layer in layers for plane in layer.planes),
        regions=_regions(layers),
    )
    return CacheLayout(layout, splits)


def fingerprint(config: VllmConfig) -> str:
    """A name that is equal on two hosts that serve the same model, wherever its files are."""
    hf_config = config.model_config.hf_config
    described = {key: value for key, value in hf_config.to_dict().items() if key not in _NOT_IN_FINGERPRINT}
    digest = hashlib.sha256(json.dumps(described, sort_keys=True, default=str).encode()).hexdigest()
    return f"{(hf_config.architectures or ['?'])[0]}/{digest[:12]}"


def _groups(cache_config: KVCacheConfig) -> Iterator[tuple[int, Any]]:
    return enumerate(group for group in cache_config.kv_cache_groups if group.enable_kv_transfer)


def _layers(kv_caches: Mapping[str, torch.Tensor], cache_config: KVCacheConfig, config: VllmConfig) -> Iterator[_Layer]:
    modules = config.compilation_config.static_forward_context
    for index, group in _groups(cache_config):
        for name in group.layer_names:
            spec = group.kv_cache_spec
            if isinstance(spec, UniformTypeKVCacheSpecs):
                spec = spec.kv_cache_specs[name]
            cache = kv_caches[name]
            if not isinstance(spec, AttentionSpec) or cache.dim() != 4:
                raise _unsupported(name, f"its cache is {type(spec).__name__} of shape {tuple(cache.shape)}")
            backend = modules[name].get_attn_backend().get_name()
            yield _Layer(name, index, cache, spec, backend, getattr(modules[name], "isa", ""))


def _split(layers: tuple[_Layer, ...], index: int, group: Any, num_blocks: int) -> BlockSplit:
    tokens = {int(layer.cache.shape[2]) for layer in layers if layer.group == index}
    if len(tokens) != 1:
        raise _unsupported(group.layer_names[0], f"its group has blocks of {sorted(tokens)} tokens")
    block_size = tokens.pop()
    return BlockSplit(block_size, group.kv_cache_spec.block_size // block_size)


def _heads(config: VllmConfig, layers: tuple[_Layer, ...], heads: int, rank: Rank) -> tuple[int, int]:
    """How many KV heads the model has, and the first that this rank holds."""
    is_latent = isinstance(layers[0].spec, MLAAttentionSpec)
    total = 1 if is_latent else int(config.model_config.get_total_num_kv_heads())
    expected = max(1, total // rank.count)
    if heads != expected:
        raise _unsupported(layers[0].name, f"it keeps {heads} heads where the model has {expected} per rank")
    return total, rank.number * total // rank.count


def _regions(layers: tuple[_Layer, ...]) -> tuple[Region, ...]:
    """The memory that the caches lie in; vLLM makes one allocation for all layers."""
    storages = {layer.cache.untyped_storage().data_ptr(): layer.cache for layer in layers}
    return tuple(
        Region(base, cache.untyped_storage().nbytes(), max(0, cache.device.index or 0))
        for base, cache in sorted(storages.items())
    )


def _common(layers: tuple[_Layer, ...], what: str, values: list[int]) -> int:
    if not layers:
        raise ConfigError("model", "has no layer with a KV cache", _NO_HYBRID)
    for layer, value in zip(layers, values, strict=True):
        if value != values[0]:
            raise _unsupported(layer.name, f"its {what} is {value}, that of {layers[0].name} {values[0]}")
    return values[0]


def _unsupported(layer: str, problem: str) -> ConfigError:
    return ConfigError(f"KV cache of {layer}", problem, _NO_HYBRID)
