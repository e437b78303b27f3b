"""vLLM finds the connector by its name, in every process, at no cost to those that do not use it."""

import logging
import subprocess
import sys

import pytest
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

from kvpush.vllm.connector import KVPushConnector
from kvpush.vllm.plugin import CONNECTOR, register


def test_registered_name_leads_to_the_connector() -> None:
    register()

    assert KVConnectorFactory.get_connector_class_by_name(CONNECTOR) is KVPushConnector


def test_registering_again_changes_nothing() -> None:
    register()
    register()

    assert CONNECTOR in KVConnectorFactory._registry


@pytest.mark.timeout(600)
def test_registering_imports_neither_the_connector_nor_the_transport() -> None:
    code = (
        "import sys; from kvpush.vllm.plugin import register; register(); "
        "print([name for name in sys.modules if name in ('kvpush.vllm.connector', 'kvpush.runtime.thread', 'nixl')])"
    )
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout.splitlines()[-1] == "[]"


def test_log_lines_of_kvpush_go_where_those_of_vllm_go() -> None:
    register()

    assert logging.getLogger("kvpush").parent is logging.getLogger("vllm")
