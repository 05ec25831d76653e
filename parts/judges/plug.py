"""`async def` rewards, which wait for a server (README.md)."""
from parts.judges.pool import JudgeArgs as Flags  # noqa: F401
from parts.judges.pool import JudgePool

METRICS = {"reward/retries": "retries of async rewards"}


def pool(kind, args, waits):
    return JudgePool if waits else None
