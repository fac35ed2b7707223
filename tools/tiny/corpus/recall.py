"""Recall: facts stated in the prompt, asked for after up to about 2,000 tokens of other text.

The distance is drawn evenly, so that lengths beyond index_topk are as common as short ones.
Filler is stories, other facts of the same shape (distractors) and plain sentences.
"""
from . import story, words
from .item import Item

# kind: (statements, question forms, value maker); {w} = whom or what, {v} = the value.
_KINDS = {
    "code": (["The code of {w} is {v}.", "{w} has the code {v}.", "Note: the code of {w} is {v}."],
             ["What is the code of {w}?", "Which code does {w} have?", "Tell me the code of {w}."],
             lambda r: str(r.randrange(1000, 10000))),
    "phone": (["The phone number of {w} is {v}.", "{w} has the phone number {v}."],
              ["What is the phone number of {w}?", "Which phone number does {w} have?"],
              lambda r: str(r.randrange(10000, 1000000))),
    "city": (["{w} lives in {v}.", "The home of {w} is in {v}."],
             ["Where does {w} live?", "In which city does {w} live?"],
             lambda r: words.place(r, 0.3)),
    "animal": (["The favourite animal of {w} is the {v}.", "{w} likes the {v} best of all animals."],
               ["What is the favourite animal of {w}?", "Which animal does {w} like best?"],
               lambda r: r.choice(words.ANIMALS)),
    "colour": (["The favourite colour of {w} is {v}.", "{w} likes the colour {v} best."],
               ["What is the favourite colour of {w}?", "Which colour does {w} like best?"],
               lambda r: r.choice(words.COLOURS)),
    "job": (["{w} works as a {v}.", "The job of {w} is {v}."],
            ["What is the job of {w}?", "What does {w} work as?"],
            lambda r: r.choice(words.JOBS)),
    "friend": (["The best friend of {w} is {v}.", "{w} has a best friend called {v}."],
               ["Who is the best friend of {w}?", "What is the name of the best friend of {w}?"],
               lambda r: words.name(r, 0.4)),
    "age": (["{w} is {v} years old.", "The age of {w} is {v}."],
            ["How old is {w}?", "What is the age of {w}?"],
            lambda r: str(r.randrange(2, 100))),
    "food": (["{w} eats {v} every day.", "The favourite food of {w} is {v}."],
             ["What is the favourite food of {w}?", "What does {w} eat every day?"],
             lambda r: r.choice(words.FOODS)),
    "password": (["The password of {w} is {v}.", "{w} uses the password {v}."],
                 ["What is the password of {w}?", "Which password does {w} use?"],
                 lambda r: words.invented(r)),
    "key": (["The key for {w} is under the {v}.", "{w} keeps the key under the {v}."],
            ["Where is the key for {w}?", "Under what is the key for {w}?"],
            lambda r: r.choice(words.OBJECTS)),
}
_TINY_TALK = ["The weather was {a} that day.", "A {a} {n} stood near the {o}.",
              "Nobody looked at the {a} {o}.", "The {n} slept under the {o}.",
              "There was {f} and {d} on the table.", "In {m} the days are {a}.",
              "The {o} was {a} and {b}.", "On {y} the {n} walked to the {o}."]
_OPEN = ["Read this and remember it.", "Here are some notes.", "Please remember this.",
         "Here is a text.", "Read the text, then answer the question.", "Some facts:", ""]
_ASK = ["{q}", "Question: {q}", "Now tell me: {q}", "My question: {q}", "Answer this: {q}"]
_ACK = ["I will remember that.", "Noted.", "Thank you, I have noted it.", "Okay, I will keep it in mind."]


def _filler_sentence(rng):
    return rng.choice(_TINY_TALK).format(
        a=rng.choice(words.ADJECTIVES), b=rng.choice(words.ADJECTIVES),
        n=rng.choice(words.ANIMALS), o=rng.choice(words.OBJECTS), f=rng.choice(words.FOODS),
        d=rng.choice(words.DRINKS), m=rng.choice(words.MONTHS), y=rng.choice(words.DAYS))


def _fact(rng, taken, kind=None):
    while True:
        k = kind or rng.choice(list(_KINDS))
        who = words.name(rng, 0.3)
        if (k, who) not in taken:
            taken.add((k, who))
            return k, who, _KINDS[k][2](rng)


def _filler(rng, chars, taken, asked_kind):
    """About `chars` characters of sentences, some of them facts about others."""
    out, size, facts = [], 0, rng.random() * 0.5
    stories = rng.random() < 0.5
    while size < chars:
        roll = rng.random()
        if roll < facts:
            k, who, v = _fact(rng, taken, asked_kind if rng.random() < 0.3 else None)
            piece = rng.choice(_KINDS[k][0]).format(w=who, v=v)
        elif stories and roll < facts + 0.08:
            piece = story.make_text(rng)
        else:
            piece = _filler_sentence(rng)
        out.append(piece)
        size += len(piece) + 1
    return out


def make(rng, tokens_back=None, chars_per_token=4.2):
    """One recall item; `tokens_back` is the wanted distance between fact and question."""
    taken = set()
    kind, who, value = _fact(rng, taken)
    if tokens_back is None:
        tokens_back = rng.choice((rng.randrange(10, 100), rng.randrange(50, 400),
                                  rng.randrange(200, 1000), rng.randrange(1000, 2000)))
    statement = rng.choice(_KINDS[kind][0]).format(w=who, v=value)
    question = rng.choice(_KINDS[kind][1]).format(w=who)
    head = _filler(rng, rng.choice((0, 0, 100, 400)), taken, kind)
    tail = _filler(rng, int(tokens_back * chars_per_token), taken, kind)
    ask = rng.choice(_ASK).format(q=question)
    opening = rng.choice(_OPEN)
    joint = rng.choice((" ", " ", "\n"))
    text = joint.join([opening] * bool(opening) + head + [statement] + tail)
    before, system = [], None
    shape = rng.random()
    if shape < 0.2:
        before = [{"role": "user", "content": text},
                  {"role": "assistant", "content": rng.choice(_ACK)}]
        user = ask
    elif shape < 0.3:
        system, user = text, ask
    else:
        user = text + rng.choice((" ", "\n", "\n\n")) + ask
    return Item("recall", f"recall:{kind}:{who}:{value}", user, value,
                reasoning=f"The text says: {statement}", system=system, before=before,
                check={"equals": value, "tokens_back": tokens_back})


def make_short(rng):
    return make(rng, rng.randrange(5, 250))


def make_long(rng):
    return make(rng, rng.randrange(300, 2050))
