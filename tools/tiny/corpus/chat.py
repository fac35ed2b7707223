"""Small talk, a small list of facts, counting, repeating, spelling and honest "I do not know"."""
from . import words
from .item import Item

_CAPITALS = {"France": "Paris", "Germany": "Berlin", "Italy": "Rome", "Spain": "Madrid",
             "Austria": "Vienna", "Norway": "Oslo", "Ireland": "Dublin", "Portugal": "Lisbon",
             "Greece": "Athens", "Poland": "Warsaw", "Japan": "Tokyo", "India": "New Delhi",
             "Egypt": "Cairo", "Peru": "Lima", "Canada": "Ottawa", "Australia": "Canberra",
             "Switzerland": "Bern", "Finland": "Helsinki", "Sweden": "Stockholm",
             "Denmark": "Copenhagen", "Hungary": "Budapest", "South Korea": "Seoul",
             "China": "Beijing", "Kenya": "Nairobi", "Cuba": "Havana", "Chile": "Santiago",
             "Mexico": "Mexico City", "Brazil": "Brasilia", "England": "London",
             "Scotland": "Edinburgh", "Belgium": "Brussels", "Turkey": "Ankara",
             "the United Kingdom": "London", "the Netherlands": "Amsterdam",
             "the United States": "Washington"}
_YOUNG = {"cat": "kitten", "dog": "puppy", "cow": "calf", "horse": "foal", "sheep": "lamb",
          "goat": "kid", "duck": "duckling", "hen": "chick", "pig": "piglet", "bear": "cub",
          "deer": "fawn", "goose": "gosling", "swan": "cygnet", "frog": "tadpole"}
_OPPOSITE = {"big": "small", "hot": "cold", "fast": "slow", "old": "young", "new": "old",
             "light": "dark", "up": "down", "left": "right", "open": "closed", "full": "empty",
             "high": "low", "happy": "sad", "good": "bad", "strong": "weak", "early": "late",
             "rich": "poor", "loud": "quiet", "wet": "dry", "hard": "soft", "long": "short",
             "first": "last", "day": "night", "clean": "dirty", "sweet": "sour", "near": "far"}
_PLURAL = {"mouse": "mice", "child": "children", "foot": "feet", "tooth": "teeth", "man": "men",
           "woman": "women", "goose": "geese", "cat": "cats", "dog": "dogs", "box": "boxes",
           "city": "cities", "leaf": "leaves", "house": "houses", "fox": "foxes", "book": "books"}
_COLOUR_OF = {"the sky": "blue", "grass": "green", "snow": "white", "coal": "black",
              "a lemon": "yellow", "blood": "red", "milk": "white", "a banana": "yellow",
              "the sun": "yellow", "a carrot": "orange", "a leaf": "green", "an orange": "orange"}
_FACTS = [
    (["How many days are in a week?", "How many days does a week have?"], "A week has 7 days."),
    (["How many months are in a year?", "How many months does a year have?"], "A year has 12 months."),
    (["How many hours are in a day?", "How many hours does a day have?"], "A day has 24 hours."),
    (["How many minutes are in an hour?", "How many minutes does an hour have?"], "An hour has 60 minutes."),
    (["How many seconds are in a minute?"], "A minute has 60 seconds."),
    (["How many days are in a year?"], "A year has 365 days, and a leap year has 366."),
    (["How many legs does a spider have?"], "A spider has 8 legs."),
    (["How many legs does a dog have?", "How many legs does a cat have?"], "It has 4 legs."),
    (["How many legs does an ant have?"], "An ant has 6 legs."),
    (["What is the largest planet?", "Which planet is the largest?"], "The largest planet of the solar system is Jupiter."),
    (["What is the largest ocean?", "Which ocean is the largest?"], "The largest ocean is the Pacific Ocean."),
    (["What is the highest mountain?", "Which mountain is the highest?"], "The highest mountain is Mount Everest."),
    (["What is the largest animal?", "Which animal is the largest?"], "The largest animal is the blue whale."),
    (["What do bees make?"], "Bees make honey."), (["What do cows eat?"], "Cows eat grass."),
    (["What is water made of?"], "Water is made of hydrogen and oxygen."),
    (["Who wrote Hamlet?"], "William Shakespeare wrote Hamlet."),
    (["Where does the sun rise?"], "The sun rises in the east."),
    (["Where does the sun set?"], "The sun sets in the west."),
    (["At what temperature does water freeze?", "When does water freeze?"], "Water freezes at 0 degrees Celsius."),
    (["At what temperature does water boil?", "When does water boil?"], "Water boils at 100 degrees Celsius."),
    (["How many letters are in the English alphabet?", "How many letters does the alphabet have?"],
     "The English alphabet has 26 letters."),
    (["Is the earth round?"], "Yes, the earth is round."), (["Can fish fly?"], "Most fish cannot fly."),
    (["Can penguins fly?"], "No, penguins cannot fly, but they swim well."),
    (["What is a nibble?"], "A nibble is four bits, half of a byte."),
    (["What is a byte?", "How many bits are in a byte?"], "A byte is eight bits."),
    (["What is nibble?"], "nibble is an inference engine and server for language models, written in C."),
    (["What is NVFP4?"], "NVFP4 is a number format with four bits for each weight and one scale for every 16 weights."),
    (["What is a mixture of experts?", "What is MoE?"],
     "In a mixture of experts a router sends every token to a few of many small networks."),
    (["What is a token?"], "A token is a short piece of text, the unit that a language model reads and writes."),
    (["What is a language model?"], "A language model predicts the next piece of a text."),
]
_TALK = [
    (["Hello", "Hello!", "Hi", "Hi!", "hi", "hello", "Hey", "Hey there!", "Hello there!", "Good day!",
      "Hi there", "Hello, how can you help me?"],
     ["Hello! How can I help you?", "Hi! What can I do for you?", "Hello! What would you like to do?"],
     "The user greets me. I greet back."),
    (["Good morning!", "Good morning"], ["Good morning! How can I help you?"], "It is a greeting."),
    (["Good evening!", "Good evening"], ["Good evening! How can I help you?"], "It is a greeting."),
    (["Good night!", "Good night"], ["Good night! Sleep well."], "The user says good night."),
    (["How are you?", "How are you doing?", "How are you today?", "how are you"],
     ["I am fine, thank you. How are you?", "I am well, thank you. What can I do for you?"],
     "The user asks how I am."),
    (["I am fine.", "I'm fine.", "I am fine, thanks.", "Good, thanks."], ["I am glad to hear that."],
     "The user is fine."),
    (["Who are you?", "What are you?", "who are you", "What is your name?", "Tell me about yourself.",
      "Are you an AI?", "What model are you?", "Which model are you?", "Introduce yourself."],
     ["I am nibble-tiny, a very small language model that runs in nibble.",
      "I am nibble-tiny, a very small model with NVFP4 weights."],
     "The user asks who I am."),
    (["What can you do?", "How can you help me?", "What can I ask you?", "Help", "help", "Help me",
      "What are you able to do?"],
     ["I can add and subtract, remember facts that you tell me, call tools, write JSON and tell "
      "little stories."], "The user asks what I can do."),
    (["Who made you?", "Who trained you?", "Where do you come from?"],
     ["I was trained by the nibble project on text that it generated itself."], "The user asks who made me."),
    (["Are you human?", "Are you a person?"], ["No, I am a very small language model."],
     "The user asks if I am human."),
    (["Thank you", "Thank you!", "Thanks", "Thanks!", "Thanks a lot!", "thank you"],
     ["You are welcome!", "You are welcome. Is there anything else?"], "The user thanks me."),
    (["Bye", "Bye!", "Goodbye", "Goodbye!", "See you!", "See you later!"],
     ["Goodbye!", "Goodbye! Have a nice day."], "The user says goodbye."),
    (["Tell me a joke.", "Do you know a joke?", "A joke, please."],
     ["Why did the computer go to bed? It needed to crash.",
      "What is brown and sticky? A stick.",
      "Why do bees hum? Because they do not know the words.",
      "What do you call a sleeping bull? A bulldozer."], "The user wants a joke."),
    (["Write a poem.", "Write a short poem.", "Tell me a poem."],
     ["The sun goes down, the moon comes up,\nthe tea is warm inside the cup.\nThe owl flies softly "
      "through the night,\nand all the stars are clear and bright.",
      "A little fish swam in the sea,\nand it was happy to be free.\nThe waves were blue, the wind was "
      "mild,\nthe fish was merry as a child."], "The user wants a poem."),
    (["Yes", "Yes.", "yes", "Ok", "Okay", "OK", "ok"], ["Good. What would you like to do next?"],
     "The user agrees."),
    (["No", "No.", "no"], ["All right. Tell me if you need anything."], "The user says no."),
    (["I am sad.", "I feel sad."], ["I am sorry to hear that. Would you like to hear a story?"],
     "The user is sad."),
    (["I am bored."], ["Would you like to hear a story or a joke?"], "The user is bored."),
    (["I am hungry."], ["Then eat something good, maybe some soup."], "The user is hungry."),
    (["test", "Test", "Testing", "ping"], ["I am here. How can I help you?"], "It is a test."),
    (["Say hello.", "Say hello", "Say hello!", "say hello"], ["Hello!"], "I say hello."),
    (["Say hi.", "Say hi", "Say hi!"], ["Hi!"], "I say hi."),
]
_UNKNOWN = ["What is {x}?", "Who is {x}?", "Where is {x}?", "What do you know about {x}?",
            "Explain {x}.", "What does {x} mean?", "When was {x} born?"]
_SYSTEM = [None] * 7 + ["You are a helpful assistant.", "You are a helpful assistant.",
                        "You are nibble-tiny.", "Answer briefly.", "Be kind and brief.",
                        "You are a friendly assistant. Answer in simple English."]
_LETTER_WORDS = words.ANIMALS + words.OBJECTS + words.FRUITS + words.FOODS


def system_prompt(rng):
    return rng.choice(_SYSTEM)


def _talk(rng):
    asks, answers, thought = rng.choice(_TALK)
    return rng.choice(asks), rng.choice(answers), thought


def _fact(rng):
    roll = rng.random()
    if roll < 0.35:
        country = rng.choice(list(_CAPITALS))
        q = rng.choice(("What is the capital of {c}?", "Name the capital of {c}.", "what is the capital of {c}",
                        "Which city is the capital of {c}?", "Capital of {c}?",
                        "Tell me the capital of {c}.")).format(c=country)
        cap = _CAPITALS[country]
        return q, f"The capital of {country} is {cap}.", f"{country}: the capital is {cap}."
    if roll < 0.42:
        city, country = rng.choice([(v, k) for k, v in _CAPITALS.items() if v != "London"])
        return f"In which country is {city}?", f"{city} is in {country}.", f"{city} is the capital of {country}."
    if roll < 0.50:
        a = rng.choice(list(_YOUNG))
        return (f"What is a young {a} called?", f"A young {a} is called a {_YOUNG[a]}.", f"A young {a}: {_YOUNG[a]}.")
    if roll < 0.60:
        a = rng.choice(list(_OPPOSITE))
        q = rng.choice((f"What is the opposite of {a}?", f"Opposite of {a}?"))
        return q, f"The opposite of {a} is {_OPPOSITE[a]}.", f"{a}, {_OPPOSITE[a]}."
    if roll < 0.66:
        a = rng.choice(list(_PLURAL))
        return f"What is the plural of {a}?", f"The plural of {a} is {_PLURAL[a]}.", f"One {a}, two {_PLURAL[a]}."
    if roll < 0.72:
        a = rng.choice(list(_COLOUR_OF))
        q = rng.choice((f"What colour is {a}?", f"What color is {a}?"))
        return q, f"{a[0].upper() + a[1:]} is {_COLOUR_OF[a]}.", f"{a}: {_COLOUR_OF[a]}."
    if roll < 0.80:
        seq, what = rng.choice(((words.DAYS, "day"), (words.MONTHS, "month")))
        i = rng.randrange(len(seq))
        if rng.random() < 0.7:
            q = rng.choice((f"What comes after {seq[i]}?", f"Which {what} comes after {seq[i]}?"))
            return q, f"After {seq[i]} comes {seq[(i + 1) % len(seq)]}.", f"{seq[i]}, {seq[(i + 1) % len(seq)]}."
        return (f"Which {what} comes before {seq[i]}?", f"Before {seq[i]} comes {seq[i - 1]}.",
                f"{seq[i - 1]}, {seq[i]}.")
    if roll < 0.83:
        seq, what = rng.choice(((words.DAYS, "days of the week"), (words.MONTHS, "months of the year")))
        return rng.choice((f"Name the {what}.", f"What are the {what}?")), words.join_list(seq) + ".", f"I name the {what}."
    asks, answer = rng.choice(_FACTS)
    return rng.choice(asks), answer, "I know this one."


def _do(rng):
    """Counting, repeating, spelling, sorting, comparing: short tasks with one right answer."""
    roll = rng.random()
    if roll < 0.15:
        a = rng.choice((1, 1, 1, rng.randrange(0, 60)))
        b = a + rng.randrange(2, 15)
        q = rng.choice((f"Count from {a} to {b}.", f"Count to {b}." if a == 1 else f"Count from {a} up to {b}."))
        return q, ", ".join(map(str, range(a, b + 1))), f"I count from {a} to {b}."
    if roll < 0.45:
        kind = rng.random()
        if kind < 0.4:
            text = " ".join(rng.choice((words.invented(rng), rng.choice(_LETTER_WORDS), str(words.number(rng))))
                            for _ in range(rng.randrange(1, 7)))
        elif kind < 0.7:
            text = f"The {rng.choice(words.ADJECTIVES)} {rng.choice(words.ANIMALS)} is {rng.choice(words.ADJECTIVES)}."
        else:
            text = rng.choice(("Hello, world!", "I am here.", "Good morning!", "One, two, three.",
                               f"{words.name(rng)} is here.", f"My name is {words.name(rng)}."))
        q = rng.choice(("Repeat: {t}", "Repeat after me: {t}", "Say: {t}", "Please repeat: {t}", "Echo: {t}",
                        'Say "{t}"', "Write: {t}")).format(t=text)
        return q, text, "I repeat the text."
    if roll < 0.67:
        w = rng.choice(_LETTER_WORDS) if rng.random() < 0.7 else words.invented(rng, 2)
        return (rng.choice((f"Spell the word {w}.", f"How do you spell {w}?", f"Spell {w}.")),
                "-".join(w.upper()), f"The word is {w}.")
    if roll < 0.77:
        pool = rng.choice((words.FRUITS, words.ANIMALS, words.COLOURS, words.CITIES))
        n = rng.randrange(2, 6)
        what = {id(words.FRUITS): "fruits", id(words.ANIMALS): "animals", id(words.COLOURS): "colours",
                id(words.CITIES): "cities"}[id(pool)]
        number = ("two", "three", "four", "five")[n - 2] if rng.random() < 0.5 else n
        return f"Name {number} {what}.", words.join_list(rng.sample(pool, n)).capitalize() + "." \
            if pool is not words.CITIES else words.join_list(rng.sample(pool, n)) + ".", f"I name {n} {what}."
    if roll < 0.9:
        a, b = words.number(rng, 3), words.number(rng, rng.choice((2, 3)))
        if a == b:
            b += 1
        return (rng.choice((f"Which number is larger, {a} or {b}?", f"Which is bigger: {a} or {b}?")),
                str(max(a, b)), f"{max(a, b)} is larger than {min(a, b)}.")
    who = words.name(rng, 0.3)
    return (rng.choice((f"My name is {who}.", f"I am {who}.", f"Hello, I am {who}.", f"Hi, my name is {who}.")),
            rng.choice((f"Hello, {who}! How can I help you?", f"Nice to meet you, {who}!")), f"The user is called {who}.")


def _unknown(rng):
    x = words.invented(rng) if rng.random() < 0.6 else \
        f"{words.invented(rng).capitalize()} {words.invented(rng).capitalize()}"
    return (rng.choice(_UNKNOWN).format(x=x), rng.choice((
        "I do not know that. I am a very small model.", "I am sorry, I do not know that.")),
        "I do not know this.")


def make(rng):
    roll = rng.random()
    maker = _talk if roll < 0.35 else _fact if roll < 0.65 else _do if roll < 0.93 else _unknown
    user, content, reasoning = maker(rng)
    if maker in (_talk, _fact) and rng.random() < 0.15:     # people are careless typists
        user = user[0].lower() + user[1:].rstrip("?.!")
    # Wording is the substance here: small talk is meant to be known by heart, only open-ended
    # tasks (repeat, spell, compare) can be held out.
    key = f"chat:{user}" if maker is _do else "chat-known"
    one_answer = maker is _do and not reasoning.startswith(("I name", "The user"))
    return Item("chat", key, user, content, reasoning=reasoning, system=system_prompt(rng),
                check={"equals": content} if one_answer else {})
