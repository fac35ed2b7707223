"""Word lists shared by the skill modules, and invented words for copying tasks."""

FIRST_NAMES = """Anna Ben Clara David Emma Felix Greta Henry Iris Jack Kate Leo Mia Noah Olga Paul
Rosa Sam Tina Uma Victor Wendy Yara Zoe Adam Bella Carl Daisy Eric Fiona George Hanna Ivan Julia
Karl Lena Max Nina Oscar Petra Quinn Ruth Simon Tom Vera Will Alice Bruno Cora Dora Elsa Frank
Gina Hugo Ida Jonas Kira Luis Maya Nora Otto Pia Ralf Sara Theo Ursula Viktor Wanda Lucy Peter
Mark Laura James Mary John Linda Robert Susan Daniel Grace Oliver Sophie Ethan Chloe Lucas Ella
Amir Chen Dana Elif Farid Hiro Jin Kofi Lin Mei Omar Priya Ravi Sven Tariq Yuki""".split()
LAST_NAMES = """Smith Brown Miller Baker Carter Fischer Stone Hill Wood Reed Lake King Young Clark
Lewis Walker Hall Green Adams Scott Cook Bell Ward Gray Cole Ford Hunt Moss Park Rose""".split()
CITIES = """Paris London Berlin Rome Madrid Vienna Oslo Dublin Lisbon Prague Athens Warsaw Tokyo
Delhi Cairo Lima Quito Boston Chicago Denver Seattle Toronto Sydney Hamburg Munich Zurich Geneva
Milan Naples Porto Bergen Helsinki Stockholm Copenhagen Budapest Kyoto Osaka Seoul Beijing Hanoi
Nairobi Lagos Tunis Havana Bogota Santiago Montreal Austin Dallas Miami""".split()
COUNTRIES = """France Germany Italy Spain Austria Norway Ireland Portugal Greece Poland Japan India
Egypt Peru Canada Australia Switzerland Finland Sweden Denmark Hungary Korea China Kenya Cuba Chile
Mexico Brazil""".split()
COLOURS = """red blue green yellow white black brown grey purple orange pink golden silver
turquoise violet""".split()
ANIMALS = """cat dog horse cow pig sheep goat duck goose hen fox wolf bear deer mouse rabbit owl
eagle frog fish whale lion tiger monkey snake turtle hedgehog squirrel beaver otter badger swan
crow sparrow robin donkey camel penguin seal bee ant spider snail""".split()
FRUITS = """apple pear plum cherry peach grape lemon banana melon fig apricot mango kiwi
strawberry raspberry blueberry""".split()
OBJECTS = """book lamp chair table clock key box cup plate spoon bottle basket hammer rope ladder
bag coat hat shoe ring coin stone map flag bell drum piano violin candle mirror pillow blanket
ball kite boat bicycle car train ticket letter pencil pen ruler brush bucket umbrella""".split()
FOODS = """bread soup rice cheese pasta cake pie salad honey butter jam pancakes noodles pizza
porridge beans stew toast""".split()
DRINKS = "tea coffee water milk juice cocoa lemonade".split()
JOBS = """teacher doctor baker farmer painter sailor pilot nurse cook gardener carpenter driver
singer writer tailor builder judge dentist plumber librarian""".split()
HOBBIES = """reading swimming running cooking painting singing dancing chess fishing hiking
cycling sewing gardening skating climbing knitting photography""".split()
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
MONTHS = """January February March April May June July August September October November
December""".split()
ADJECTIVES = """big small old new fast slow warm cold soft hard light heavy clean quiet loud bright
dark round long short deep strong gentle clever brave happy simple strange rich fresh sweet""".split()
VERBS = """open close move find send read write draw build clean paint carry count check start
stop show hide save load print play sing mark sort""".split()

_ONSETS = "b br c ch cl d dr f fl g gr h j k kl l m n p pl qu r s sh sk sl st t tr v w z".split()
_VOWELS = "a e i o u ai ea oo ou".split()
_CODAS = ["", "", "", "l", "m", "n", "nd", "r", "rk", "s", "st", "t", "x", "ck", "ng"]


def invented(rng, syllables=None):
    """A pronounceable word that no list holds: teaches copying instead of recalling."""
    n = syllables or rng.choice((1, 2, 2, 3))
    return "".join(rng.choice(_ONSETS) + rng.choice(_VOWELS) + rng.choice(_CODAS)
                   for _ in range(n))


def name(rng, strange=0.25):
    return invented(rng, 2).capitalize() if rng.random() < strange else rng.choice(FIRST_NAMES)


def place(rng, strange=0.25):
    return invented(rng, 2).capitalize() if rng.random() < strange else rng.choice(CITIES)


def number(rng, digits=None):
    """An integer with a length drawn first, so that short and long ones are equally common."""
    digits = digits or rng.choice((1, 2, 2, 3, 3, 4))
    low = 0 if digits == 1 else 10 ** (digits - 1)
    return rng.randrange(low, 10 ** digits)


def article(word):
    return ("an " if word[0] in "aeiouAEIOU" else "a ") + word


def join_list(parts, word="and"):
    parts = list(parts)
    if len(parts) < 2:
        return "".join(parts)
    return ", ".join(parts[:-1]) + f" {word} " + parts[-1]
