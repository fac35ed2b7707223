"""The item: one exchange with a checkable answer, and the rule that splits train from held-out.

Callers: every skill module makes Items; stream.py joins them into documents; evalset.py picks
held-out ones. Invariant: `key` names the substance of the task (numbers, names, arguments), never
its wording, so that a held-out task is new in every wording.
"""
import hashlib
from dataclasses import dataclass, field

HELD_OUT_ONE_IN = 20


@dataclass
class Item:
    skill: str
    key: str
    user: str                       # what the user says last
    content: str                    # the final answer
    reasoning: str = ""             # text between <think> and </think> when thinking is on
    system: str | None = None
    tools: list | None = None       # OpenAI tool declarations
    tool_calls: list | None = None  # [{"name":…, "arguments": {…}}] instead of content
    before: list = field(default_factory=list)  # earlier messages (role/content dicts)
    check: dict = field(default_factory=dict)   # what evaluation compares


def is_held_out(key: str) -> bool:
    digest = hashlib.blake2b(key.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % HELD_OUT_ONE_IN == 0


def draw(make, rng, held_out: bool = False):
    """Draw items from `make(rng)` until one is on the wanted side of the split."""
    for _ in range(10000):
        item = make(rng)
        if is_held_out(item.key) == held_out:
            return item
    raise RuntimeError(f"no item on the wanted side of the split from {make.__module__}")
