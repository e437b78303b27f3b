"""Which part may import what: the arrows of docs/architecture.md."""

from itertools import chain

import pytest
from architecture.source import Import, Source, library

# each layer, and those whose modules it may import besides its own
ALLOWED = {
    "core": (),
    "transport": ("core",),
    "runtime": ("transport", "core"),
    "vllm": ("runtime", "transport", "core"),
    "router": ("core",),
    "sim": ("vllm", "runtime", "transport", "core"),
    "bench": ("cli", "sim", "router", "vllm", "runtime", "transport", "core"),
    "cli": ("bench", "sim", "router", "vllm", "runtime", "transport", "core"),
}
ROUTER_SEES = ("kvpush.core.params", "kvpush.core.ids", "kvpush.core.errors")

# a package of others, and the only modules or packages that may import it
CONFINED = {
    "nixl": ("kvpush.transport.nixl",),
    "vllm": ("kvpush.vllm", "kvpush.sim"),
    "torch": ("kvpush.vllm", "kvpush.sim", "kvpush.cli.models"),
    "transformers": ("kvpush.sim", "kvpush.cli.models", "kvpush.bench"),
    "tokenizers": ("kvpush.sim", "kvpush.cli.models", "kvpush.bench"),
    "safetensors": ("kvpush.sim", "kvpush.cli.models"),
    "zmq": ("kvpush.runtime",),
    "aiohttp": ("kvpush.router", "kvpush.bench"),
    "httptools": ("kvpush.router.connection",),
    "uvloop": ("kvpush.router", "kvpush.bench"),
    "typer": ("kvpush.cli",),
    "rich": ("kvpush.cli", "kvpush.bench"),
    "prometheus_client": ("kvpush.router", "kvpush.vllm", "kvpush.bench", "kvpush.cli"),
    "psutil": ("kvpush.cli", "kvpush.bench", "kvpush.sim"),
}
CORE_SEES = {
    *("msgspec", "numpy", "kvpush"),
    *("collections", "dataclasses", "enum", "functools", "itertools", "math", "operator", "typing", "heapq", "bisect"),
    *("hashlib", "types", "contextlib", "abc"),
}

MODULES = library()


def within(module: str, packages: tuple[str, ...]) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in packages)


def of_layer(layer: str) -> list[Source]:
    return [source for source in MODULES if source.layer == layer]


def imports_of(sources: list[Source], package: str) -> list[tuple[Source, Import]]:
    return [(source, found) for source in sources for found in source.imports if within(found.module, (package,))]


def shown(found: list[tuple[Source, Import]]) -> list[str]:
    return [f"{source.name}:{one.line} imports {one.module}" for source, one in found]


@pytest.mark.parametrize("layer", ALLOWED)
def test_layer_imports_only_layers_below_it(layer: str) -> None:
    allowed = {layer, *ALLOWED[layer], "__version__"}
    ours = [(source, one) for source, one in imports_of(of_layer(layer), "kvpush") if "." in one.module]
    assert not shown([(source, one) for source, one in ours if one.module.split(".")[1] not in allowed])


def test_router_sees_of_core_only_params_ids_and_errors() -> None:
    of_core = imports_of(of_layer("router"), "kvpush.core")
    assert not shown([(source, one) for source, one in of_core if not within(one.module, ROUTER_SEES)])


def test_core_imports_no_clock_thread_socket_or_randomness() -> None:
    everything = [(source, one) for source in of_layer("core") for one in source.imports]
    assert not shown([(source, one) for source, one in everything if one.module.split(".")[0] not in CORE_SEES])


@pytest.mark.parametrize("package", CONFINED)
def test_package_of_others_is_imported_only_at_its_seam(package: str) -> None:
    users = {
        source.module for source in MODULES if any(found.module.split(".")[0] == package for found in source.imports)
    }
    assert not {user for user in users if not within(user, CONFINED[package])}


def test_nothing_but_the_adapter_and_the_device_needs_vllm_to_be_imported() -> None:
    heavy = {"vllm", "torch", "transformers", "nixl"}
    needing = {s.module for s in MODULES if any(i.at_start and i.module.split(".")[0] in heavy for i in s.imports)}
    assert not {module for module in needing if not within(module, ("kvpush.vllm", "kvpush.sim"))}


def test_every_layer_is_known() -> None:
    assert {source.layer for source in MODULES} - {""} == set(ALLOWED)


def test_arrows_have_no_circle_but_between_bench_and_cli() -> None:
    order = list(ALLOWED)
    upward = [
        (layer, below)
        for layer, belows in ALLOWED.items()
        for below in belows
        if order.index(below) > order.index(layer)
    ]
    assert upward == [("bench", "cli")]
    assert set(chain(*ALLOWED.values())) <= set(order)
