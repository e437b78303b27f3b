"""The entry point that vLLM loads in each of its processes: makes `KVPushConnector` known by name."""

import logging

CONNECTOR = "KVPushConnector"
_MODULE = "kvpush.vllm.connector"


def register() -> None:
    """Register the connector with vLLM, by name only: its module is imported when it is asked for.

    Called by vLLM once or more in each process, whether or not the connector is used.
    """
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    _log_like_vllm()
    if CONNECTOR not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(CONNECTOR, _MODULE, CONNECTOR)


def _log_like_vllm() -> None:
    """Let kvpush's log lines go where vllm's go, in the same form and from the same level on.

    vLLM sets up its logger later, and perhaps again, so it is made the parent instead of being copied.
    """
    logging.getLogger("kvpush").parent = logging.getLogger("vllm")
