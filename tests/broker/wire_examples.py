"""One example of every message, in the order of docs/wire.md, whose bytes are made from these."""

from __future__ import annotations

import numpy as np

from broker import wire


def refs(*pairs: tuple[int, int]) -> bytes:
    """Packed row references."""
    return np.array(list(pairs), dtype=wire.ROW_REF).tobytes()


def words(*numbers: int) -> bytes:
    """Packed 32-bit numbers."""
    return np.array(numbers, dtype="<u4").tobytes()


KEY_A = b"aaaa" + b"\0\0\0\0"
KEY_B = b"bbbb" + b"\0\0\0\0"

EXAMPLES: tuple[wire.Message, ...] = (
    wire.Lookup(
        seq=7,
        request="r1",
        attempt=1,
        groups=(
            wire.LookupGroup(
                group=0,
                mode=wire.LookupMode.PREFIX,
                window=0,
                first_window=1,
                start=0,
                positions=words(16, 32),
                keys=KEY_A + KEY_B,
            ),
        ),
    ),
    wire.LookupReply(
        seq=7,
        request="r1",
        attempt=1,
        results=(wire.GroupResult(first=0, refs=refs((3, 1), (wire.ROW_MISS, 0))),),
    ),
    wire.Finish(request="r1"),
    wire.Cancel(request="r1", attempt=1),
    wire.Attach(
        protocol=1,
        client="kvquay client 0.1.0",
        engine_id="a",
        role=wire.Role.SCHEDULER,
        rank=0,
        world=1,
        row_bytes=65536,
        key_bytes=8,
        pid=4711,
        namespace=b"0123456789abcdef",
        weights_version=None,
        events=False,
    ),
    wire.Attached(
        protocol=1,
        broker="kvquay 0.1.0",
        incarnation=1,
        rows=1000,
        row_bytes=65536,
        rows_offset=8192,
        generation_offset=4096,
        memory_bytes=67108864,
        epoch=0,
    ),
    wire.Refused(
        code=wire.RefusalCode.VERSION,
        text="protocol 2 is not spoken here",
        ours="1",
        theirs="2",
    ),
    wire.SessionState(ready=False, missing=(1,)),
    wire.Begin(
        request="r1", namespace=b"", kv_transfer_params={"a": 1}, load_tiers=(("CPU", None),)
    ),
    wire.TakeHolds(request="r1", attempt=1, refs=refs((3, 1)), more=False),
    wire.CompleteLoad(request="r1", attempt=1, refs=refs((3, 1)), failed=b""),
    wire.Release(request="r1", attempt=1),
    wire.PrepareStore(seq=8, request="r1", attempt=1, positions=words(16, 32), keys=KEY_A + KEY_B),
    wire.StoreReply(
        seq=8,
        request="r1",
        attempt=1,
        status=wire.StoreStatus.OK,
        accepted=words(1),
        refs=refs((4, 1)),
        present=words(0),
        writing=b"",
    ),
    wire.CompleteStore(request="r1", attempt=1, refs=refs((4, 1)), success=True, digests=b""),
    wire.Touch(request="r1", keys=KEY_A),
    wire.Notice(request="r1", attempt=1, keys=KEY_B, refs=refs((5, 2))),
    wire.Resync(),
    wire.Events(events=(wire.Event(removed=False, medium="CPU", keys=KEY_A),)),
    wire.Reset(seq=9, weights_version="step-100"),
    wire.ResetReply(seq=9, epoch=1, sessions=1),
    wire.ResetNotice(epoch=1),
    wire.TransfersEnded(epoch=1),
    wire.MemoryReplaced(),
    wire.Ping(seq=10),
    wire.Pong(seq=10),
    wire.Status(seq=11, verify=True),
    wire.StatusReply(seq=11, status={"healthy": True}),
    wire.ResetNamespace(seq=12, namespace="00ff", weights_version=None),
    wire.Error(seq=0, code=wire.ErrorCode.MALFORMED, text="not MessagePack"),
)
