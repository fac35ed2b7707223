"""Additions and subtractions up to three digits, with the column method as short reasoning."""
from .item import Item

_ADD = ["What is {a}+{b}?", "What is {a} + {b}?", "{a}+{b}=", "{a} + {b} = ?", "Compute {a} + {b}.",
        "Calculate {a}+{b}.", "How much is {a} plus {b}?", "What is {a} plus {b}?",
        "Add {a} and {b}.", "What is the sum of {a} and {b}?", "Please add {a} and {b}.",
        "{a} + {b}", "{a}+{b}", "What's {a}+{b}?", "what is {a}+{b}", "Solve {a} + {b}."]
_SUB = ["What is {a}-{b}?", "What is {a} - {b}?", "{a}-{b}=", "{a} - {b} = ?", "Compute {a} - {b}.",
        "Calculate {a}-{b}.", "How much is {a} minus {b}?", "What is {a} minus {b}?",
        "Subtract {b} from {a}.", "What is the difference of {a} and {b}?",
        "{a} - {b}", "{a}-{b}", "What's {a}-{b}?", "what is {a}-{b}", "Solve {a} - {b}."]


def add_steps(a, b):
    """Column addition, ones first: every step is one table look-up."""
    x, y = str(a)[::-1], str(b)[::-1]
    if len(x) == 1 and len(y) == 1:
        return f"{a}+{b}={a + b}."
    out, carry = [], 0
    for i in range(max(len(x), len(y))):
        p, q = (int(s[i]) if i < len(s) else 0 for s in (x, y))
        total = p + q + carry
        line = f"{p}+{q}" + (f"+{carry}" if carry else "") + f"={total}"
        carry, digit = divmod(total, 10)
        out.append(f"{line}, write {digit}" + (f", carry {carry}" if carry else ""))
    if carry:
        out.append(f"write {carry}")
    return "; ".join(out) + f". So {a}+{b}={a + b}."


def _sub_columns(a, b):
    x, y = str(a)[::-1], str(b)[::-1]
    out, borrow = [], 0
    for i in range(len(x)):
        p, q = int(x[i]), (int(y[i]) if i < len(y) else 0)
        need = q + borrow
        top = f"{p}-{q}" + (f"-{borrow}" if borrow else "")
        if p >= need:
            out.append(f"{top}={p - need}, write {p - need}")
            borrow = 0
        else:
            out.append(f"{top}: borrow, 1{p}-{q}" + (f"-{borrow}" if borrow else "")
                       + f"={p + 10 - need}, write {p + 10 - need}")
            borrow = 1
    return "; ".join(out)


def sub_steps(a, b):
    if a < 10 and b < 10:
        return f"{a}-{b}={a - b}."
    if a < b:
        return (f"{a} is less than {b}, so the result is negative. {b}-{a}: "
                + _sub_columns(b, a) + f". So {a}-{b}={a - b}.")
    return _sub_columns(a, b) + f". So {a}-{b}={a - b}."


def operand(rng):
    digits = rng.choice((1, 2, 3, 3, 3))
    return rng.randrange(0 if digits == 1 else 10 ** (digits - 1), 10 ** digits)


def make(rng, one_digit=False):
    if one_digit:
        a, b = rng.randrange(10), rng.randrange(10)
    else:
        a, b = operand(rng), operand(rng)
        if a > 99 and rng.random() < 0.15:          # same leading digit: which one is larger?
            b = a // 100 * 100 + rng.randrange(100)
    if rng.random() < 0.5:
        text, steps, answer, op = rng.choice(_ADD), add_steps(a, b), a + b, "+"
    else:
        if a < b and rng.random() < (0.3 if one_digit else 0.6):
            a, b = b, a
        text, steps, answer, op = rng.choice(_SUB), sub_steps(a, b), a - b, "-"
    # Single-digit sums all appear in training as the columns of longer ones; only longer
    # problems can be held out in substance.
    key = f"arith:{a}{op}{b}"
    return Item("arith1" if a < 10 and b < 10 else "arith", key, text.format(a=a, b=b),
                str(answer), reasoning=steps, check={"equals": str(answer)})


def make_one_digit(rng):
    return make(rng, one_digit=True)
