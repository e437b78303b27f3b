"""What each name on the command line stands for."""

from pathlib import Path

import pytest

from kvpush.bench.contenders import Contender, Setting, make_cluster
from kvpush.cli.bench import _assignments
from kvpush.cli.parts import FIRST_TOKEN_ARGS, FORWARD_ARGS
from kvpush.core.errors import ConfigError


def test_settings_of_kvpush_reach_its_engines_and_no_others(tmp_path: Path) -> None:
    setting = Setting(device="sim:ci", logs=tmp_path, kvpush={"push": "layerwise"})
    configs = {each: dict(make_cluster(setting, each, 0).spec.connector_config) for each in Contender}
    assert configs[Contender.KVPUSH_PUSH] == configs[Contender.KVPUSH_FIRST] == {"push": "layerwise"}
    assert configs[Contender.KVPUSH_PULL] == {"push": "layerwise", "mode": "pull"}
    assert not configs[Contender.VLLM_PUSH]


def test_only_one_contender_begins_with_the_first_token(tmp_path: Path) -> None:
    setting = Setting(device="sim:ci", logs=tmp_path)
    specs = {each: make_cluster(setting, each, 0).spec for each in Contender}
    assert [each for each in specs if specs[each].decode_args == FIRST_TOKEN_ARGS] == [Contender.KVPUSH_FIRST]
    assert [each for each in specs if specs[each].router_args[-2:] == FORWARD_ARGS] == [Contender.KVPUSH_FIRST]


def test_assignments_are_read_with_their_kinds() -> None:
    assert _assignments("kvpush", "push=layerwise,reserve_early=0.5,port=0") == {
        "push": "layerwise",
        "reserve_early": 0.5,
        "port": 0,
    }
    assert _assignments("kvpush", "") == {}
    with pytest.raises(ConfigError, match="kvpush: 'layerwise' is no setting"):
        _assignments("kvpush", "layerwise")
