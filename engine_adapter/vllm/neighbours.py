"""Tells an operator, once, at the start of an engine, whether the other engines at its broker can
share with it: keys that can't match look like a cache that is never hit."""

from __future__ import annotations

import logging

from broker import wire

logger = logging.getLogger("vllm.kvquay")

ANSWER_S = 1.0


def tell(path: str, engine_id: str) -> None:
    """Log how many of the engines at the broker at `path` have the namespace of this one; a warning
    if there are others and none has. Never raises: it is only a word to a reader."""
    try:
        engines = wire.ask_status(path, "kvquay engine", ANSWER_S)["engines"]
        mine = [each["namespace"] for each in engines if each["engine_id"] == engine_id]
        others = [each["namespace"] for each in engines if each["engine_id"] != engine_id]
    except (OSError, wire.WireError, LookupError, TypeError) as error:
        logger.debug("kvquay: who else is at the broker is not known: %s", error)
        return
    if not mine or not others:
        return
    same = others.count(mine[0])
    if same:
        logger.info("kvquay: shares with %d of %d other engines here", same, len(others))
        return
    logger.warning(
        "kvquay: shares with none of the %d other engines at %s: they differ in something that KV "
        "or its keys depend on. If they should share, start both with VLLM_LOGGING_LEVEL=DEBUG and "
        'compare the lines "namespace of ..."; often it is PYTHONHASHSEED, blocks_per_chunk or '
        "dtype",
        len(others),
        path,
    )
