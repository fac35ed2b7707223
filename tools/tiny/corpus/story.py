"""Little stories in simple English from a grammar: hero, place, wish or trouble, helper, end.

Each plot is a list of steps, each step a list of alternative sentences; slots are filled once per
story, so that names, things and pronouns stay consistent from the first sentence to the last.
"""
import random
import re

from . import words
from .item import Item

_HEROES = """fox rabbit bear mouse owl hedgehog squirrel otter frog turtle duck goose goat donkey
cat dog wolf deer badger beaver penguin dragon giant dwarf wizard knight princess prince king queen
shepherd farmer baker miller fisherman sailor tailor boy girl robot""".split()
_BOYS = {"wizard", "knight", "prince", "king", "shepherd", "farmer", "miller", "fisherman", "sailor",
         "giant", "dwarf", "boy"}
_GIRLS = {"princess", "queen", "girl"}
_HE = """Ben Leo Max Tom Otto Hugo Bruno Felix Oscar Theo Jack Sam Noah Pip Bo Milo Rufus Finn Olo
Barnaby Casper Jasper Toby Anton Emil Kasimir""".split()
_SHE = """Anna Mia Clara Nora Ella Ida Rosa Luna Tilda Lily Daisy Greta Iris Zoe Emma Lotta Bella
Flora Nelly Poppy Hazel Maya Wanda Olive Ruby Molly""".split()
_KIND = """little small young old clever kind brave shy quiet curious cheerful lonely gentle tiny
lazy hungry friendly""".split()
_PLACES = ["forest", "valley", "village", "castle", "cave", "meadow", "mill", "garden", "tower",
           "hut", "farm", "harbour"]
_AT = {"forest": "in a deep forest", "valley": "in a green valley", "village": "in a quiet village",
       "castle": "in an old castle", "cave": "in a warm cave", "meadow": "beside a wide meadow",
       "mill": "in an old mill", "garden": "in a large garden", "tower": "in a high tower",
       "hut": "in a small hut", "farm": "on a sunny farm", "harbour": "near a busy harbour"}
_NEAR = ["by the river", "behind the hill", "at the edge of the forest", "under the old oak",
         "near the lake", "beside the bridge", "on top of the mountain", "in the meadow",
         "by the sea", "at the end of the road"]
_TREASURE = ["golden key", "silver bell", "red kite", "blue lamp", "wooden flute", "little boat",
             "green scarf", "old map", "round mirror", "music box", "warm blanket", "bright stone",
             "paper star", "copper ring", "small drum"]
_WEATHER = ["The sun was shining", "A soft wind was blowing", "It had rained all night",
            "The first snow had fallen", "The sky was clear and blue", "The air smelled of flowers"]
_FEEL = ["happy", "glad", "proud", "full of joy"]
_FRUIT = ["apples", "pears", "plums", "cherries", "berries", "nuts"]
_BAKE = ["bread", "cake", "soup", "pancakes", "porridge", "an apple pie", "a plum cake"]

_OPENINGS = [
    "Once upon a time in a land far away there was {a_kind_hero} called {N}.",
    "Once upon a time in a land far away there was {a_kind_hero} called {N}.",
    "Once upon a time in a land far away there was {a_kind_hero} named {N}.",
    "Once upon a time in a land far away there was {a_kind_hero} who lived {home}.",
    "Once upon a time in a land far away there lived {a_kind_hero} called {N}.",
    "Once upon a time there was {a_kind_hero} called {N}.",
    "Once upon a time there was {a_kind_hero} named {N}.",
    "Once upon a time there lived {a_kind_hero} called {N}.",
    "Long ago there was {a_kind_hero} called {N}.",
    "A long time ago {a_kind_hero} named {N} lived {home}.",
    "There once was {a_kind_hero} called {N}.",
    "Far away, behind seven hills, there was {a_kind_hero} called {N}.",
]
_HOME = ["{N} lived {home} {near}.", "{N} lived {home} and knew every path around it.",
         "{P} lived {home} with {pos} family.", "{N} had a small house {near}.",
         "The home of {N} was {near}.", "{N} lived alone {home}, but {p} had many friends."]
_HABIT = ["Every morning {p} drank {drink} and looked out of the window.",
          "Every day {p} walked to the river and counted the fish.",
          "In the evening {p} liked to sing an old song.",
          "{P} loved {food} more than anything else.", "{P} was always {adj}, even when it rained.",
          "Everybody said that {p} had a good heart.",
          "Most of all {p} liked to watch the stars at night.",
          "On {day}s {p} went to the market and bought {food}."]
_END = ["From that day on {N} and {F} were the best of friends.",
        "And if you walk {near} today, you can still hear them laugh.",
        "That night {N} slept well and dreamed of the stars.",
        "And they lived happily ever after.",
        "{N} never forgot that day.",
        "And so {N} learned that {moral}.",
        "Since then {N} has told everyone that {moral}.",
        "{N} smiled, because now {p} knew that {moral}."]
_MORALS = ["a friend is worth more than gold", "small steps lead far", "it is good to share",
           "even the smallest can help", "it is brave to ask for help", "patience wins in the end",
           "a kind word opens every door", "it is better to give than to take",
           "everyone is good at something", "the truth is always best"]

_PLOTS = {
    "lost": [
        ["One day {N} lost {pos} {thing}.", "One morning the {thing} of {N} was gone."],
        ["{P} looked under the bed, behind the door and in the garden, but it was not there.",
         "{P} looked everywhere, but {p} could not find it.",
         "{P} searched the whole house from the roof to the cellar."],
        ["{P} was sad and sat down {near2}.", "Sad and tired, {p} walked until {p} came to a place {near2}.",
         "Then {p} went out to look for it {near2}."],
        ["There {p} met {a_friend} named {F}.", "After a while {a_friend} named {F} came along."],
        ["\"Why are you so sad?\" asked {F}.", "\"What are you looking for?\" asked {F}."],
        ["\"I have lost my {thing},\" said {N}.", "\"My {thing} is gone,\" said {N}."],
        ["\"Do not worry,\" said {F}. \"We will look for it together.\"",
         "\"Two can look better than one,\" said {F}. \"I will help you.\""],
        ["They looked {near3}, and there it was, {adj} and shining in the grass.",
         "They followed the small path {near3}, and behind a stone they found the {thing}.",
         "In the evening they found the {thing} in a hollow tree {near3}."],
        ["{N} was so {feel} that {p} gave {F} a big hug.",
         "{N} thanked {F} and gave {fo} {food} and {drink}."]],
    "cold": [
        ["One winter it was so cold that the river froze.", "One night a great storm came from the north."],
        ["{N} heard a knock at the door.", "Late in the evening somebody knocked at the door of {N}."],
        ["Outside stood {a_friend} who was wet and cold.",
         "It was {a_friend} who had lost the way in the dark."],
        ["\"My name is {F},\" said the {friend}. \"May I come in?\"",
         "\"I am {F},\" said the {friend}. \"I have no place to sleep.\""],
        ["\"Of course,\" said {N}. \"Come in and sit by the fire.\"",
         "\"Come in,\" said {N}. \"There is room for two.\""],
        ["{N} cooked {bake} and gave {F} a warm blanket.",
         "They ate {bake} and drank hot {drink}."],
        ["All night they told each other stories.", "The wind was loud, but inside it was warm."],
        ["In the morning the sun came out, and {F} gave {N} a {thing}.",
         "When the storm was over, {F} left a {thing} on the table to say thank you."]],
    "journey": [
        ["One day {N} wanted to see the sea.", "One spring {N} wanted to see what was behind the mountains.",
         "{N} had always wanted to travel."],
        ["So {p} packed {food}, {pos} {thing} and a warm coat.",
         "{P} took a bag with {food} and {pos} {thing} and closed the door."],
        ["{weather}, and the road was long.", "{weather} when {p} left the house."],
        ["On the first day {p} crossed a bridge.", "On the first day {p} walked through a dark wood."],
        ["On the second day {p} met {a_friend} called {F} {near2}.",
         "On the second day {p} found {a_friend} called {F} who sat {near2}."],
        ["\"Where are you going?\" asked {F}.", "\"Hello,\" said {F}. \"You look tired.\""],
        ["\"I am going far away,\" said {N}. \"Do you want to come with me?\"",
         "\"I am on a long journey,\" said {N}. \"Will you walk with me?\""],
        ["{F} was {feel} to come along, and they shared the {food}.",
         "So they walked on together and sang all the way."],
        ["On the third day they reached the sea, and it was bigger than the sky.",
         "On the third day they stood on a high hill and could see the whole land.",
         "At last they came to a town with a thousand lights."],
        ["They stayed until the evening and watched the boats.",
         "They sat down, ate {fruit} and said nothing for a long time."]],
    "garden": [
        ["{N} had a garden where many {fruit} grew.", "Behind the house of {N} there was a tree full of {fruit}."],
        ["One summer there was no rain, and the tree became dry.",
         "One year the {fruit} did not want to grow."],
        ["Every morning {p} carried water from the river, but it was not enough.",
         "{P} carried bucket after bucket, until {pos} arms were tired."],
        ["Then {a_friend} called {F} came by and saw it.", "{a_friend_cap} called {F} watched this from the road."],
        ["\"You cannot do that alone,\" said {F}.", "\"That is too much work for one,\" said {F}."],
        ["{F} called the whole village, and everyone came with a bucket.",
         "Together they dug a long ditch from the river to the tree.",
         "{F} helped every day, and they worked from morning to night."],
        ["After two weeks the leaves were green again.", "Soon the first {fruit} were {adj} and ripe."],
        ["In autumn there were so many {fruit} that everyone got a full basket.",
         "{N} made a great feast and shared the {fruit} with all."]],
    "brave": [
        ["The others often laughed, because {N} was afraid of the dark.",
         "{N} was afraid of many things, but most of all of the dark."],
        ["One night {a_friend} called {F} did not come home.",
         "One evening {p} heard a cry. It was {F}, {a_friend}."],
        ["{F} had fallen into a deep hole {near2}.", "{F} was stuck on a small island, and the water was rising."],
        ["Nobody else was there.", "All the others were asleep."],
        ["{N} was afraid, but {p} took a lamp and a rope and went out.",
         "{pos_cap} heart beat fast, but {p} ran out into the night."],
        ["\"Hold on!\" called {N}. \"I am coming!\"", "\"Do not be afraid,\" called {N}. \"I am here!\""],
        ["{P} tied the rope to a tree and pulled with all {pos} strength.",
         "{P} threw the rope, and {F} held it tight."],
        ["At last {F} was safe.", "After a long time {F} stood on dry ground again."],
        ["\"You are the bravest {hero} in the world,\" said {F}.",
         "\"You have saved me,\" said {F}. \"Thank you!\""],
        ["From then on nobody laughed at {N} any more.", "The next day the whole village thanked {N}."]],
    "contest": [
        ["One day the {ruler} of the land held a contest.", "Every year there was a big race {near2}."],
        ["The winner would get a {thing}.", "The prize was a {thing}."],
        ["Many came, and all of them were bigger and faster than {N}.",
         "{F}, {a_friend}, was the fastest of all and was sure to win."],
        ["\"You are too slow,\" said {F} and laughed.", "\"You will never win,\" said {F}."],
        ["\"We will see,\" said {N}.", "{N} only smiled and said nothing."],
        ["The race began, and {F} ran ahead.", "At first {F} was far in front."],
        ["But in the middle of the way {F} stopped to eat {fruit} and fell asleep.",
         "But then {F} took the wrong road and came to a swamp."],
        ["{N} went on, step by step, and never stopped.", "{N} walked on slowly and did not rest."],
        ["Then {p} saw that {F} needed help, and {p} turned around.",
         "Shortly before the end {p} heard {F} cry for help and went back."],
        ["They came in last, hand in hand, but the people cheered.",
         "The {ruler} saw it and gave the prize to both of them."]],
    "moon": [
        ["One night {N} saw that the moon was gone.", "One evening the moon did not rise."],
        ["\"Who has taken the moon?\" asked {N}.", "\"Where is the moon?\" {p} asked {F}, {a_friend}."],
        ["{P} took {pos} {thing} and went to look for it.",
         "{P} put on {pos} coat and walked into the dark."],
        ["{P} asked the owl, but the owl did not know.", "{P} asked the wind, but the wind only laughed."],
        ["{P} asked the river, and the river said: \"Look {near3}.\"",
         "{P} asked the old oak, and the oak said: \"Go and look {near3}.\""],
        ["There the moon lay in a net and could not get out.",
         "There sat the moon, small and pale, and cried."],
        ["\"I wanted to see the earth,\" said the moon, \"and now I am too heavy to rise.\"",
         "\"I fell down,\" said the moon, \"and nobody can lift me.\""],
        ["{N} called all {pos} friends, and together they lifted the moon as high as they could.",
         "{N} sang a song, and with every word the moon became lighter."],
        ["Up and up it went, until it stood in the sky again.",
         "Slowly the moon rose, and the whole land was bright again."],
        ["Since then the moon looks down every night and smiles at {N}.",
         "To say thank you, the moon put a silver light on the house of {N}."]],
    "bake": [
        ["One day {N} wanted to make {bake} for {pos} friend {F}, {a_friend}.",
         "{day} was the birthday of {F}, {a_friend}, and {N} wanted to make {bake}."],
        ["But there was no flour in the house.", "But the sugar was gone, and so was the milk."],
        ["So {p} went to the mill and asked for some.", "So {p} took a basket and went from door to door."],
        ["The miller said: \"I will give you flour if you sing me a song.\"",
         "The hen said: \"I will give you an egg if you carry my water.\""],
        ["{N} did it gladly, and soon the basket was full.", "{N} helped where {p} could, and everyone gave something."],
        ["Back at home {p} mixed and stirred until {pos} arms were tired.",
         "At home {p} made a fire and sang while {p} worked."],
        ["Soon the whole house smelled sweet.", "After an hour it was ready, warm and golden."],
        ["When {F} came, {fp} could not believe {fpos} eyes.", "{F} laughed with joy and clapped {fpos} hands."],
        ["They invited all who had helped, and nothing was left on the plate.",
         "They ate together until the stars came out."]],
}


def slots(rng):
    """All names, pronouns and things of one story."""
    hero = rng.choice(_HEROES)
    male = hero in _BOYS or (hero not in _GIRLS and rng.random() < 0.5)
    friend = rng.choice([h for h in _HEROES if h != hero and h not in _BOYS | _GIRLS])
    friend_male = rng.random() < 0.5
    names = rng.sample(_HE, 2), rng.sample(_SHE, 2)
    kind, friend_kind = rng.sample(_KIND, 2)
    near = rng.sample(_NEAR, 3)
    s = {"hero": hero, "N": names[0][0] if male else names[1][0], "p": "he" if male else "she",
         "pos": "his" if male else "her", "friend": friend,
         "F": names[0][1] if friend_male else names[1][1], "fp": "he" if friend_male else "she",
         "fo": "him" if friend_male else "her", "fpos": "his" if friend_male else "her",
         "home": _AT[rng.choice(_PLACES)], "near": near[0], "near2": near[1], "near3": near[2],
         "thing": rng.choice(_TREASURE), "food": rng.choice([f for f in words.FOODS
                                                           if f not in ("cake", "pie", "salad", "stew")]),
         "drink": rng.choice(("tea", "milk", "juice", "cocoa", "water")),
         "fruit": rng.choice(_FRUIT), "adj": rng.choice(("bright", "fresh", "sweet", "warm", "golden")),
         "feel": rng.choice(_FEEL), "weather": rng.choice(_WEATHER), "day": rng.choice(words.DAYS),
         "moral": rng.choice(_MORALS), "bake": rng.choice(_BAKE), "ruler": rng.choice(("king", "queen")),
         "a_kind_hero": words.article(f"{kind} {hero}"), "a_friend": words.article(f"{friend_kind} {friend}")}
    if s["adj"] in ("fresh", "sweet", "golden", "warm"):
        s["adj"] = {"fresh": "bright", "sweet": "bright", "golden": "bright", "warm": "clean"}[s["adj"]]
    s["P"], s["pos_cap"] = s["p"].capitalize(), s["pos"].capitalize()
    s["a_friend_cap"] = s["a_friend"][0].upper() + s["a_friend"][1:]
    return s


def compose(rng, s):
    """The sentences of one story over the slots `s`."""
    opening = rng.choice(_OPENINGS)
    out = [opening.format(**s)]
    if "called" not in opening and "named" not in opening:
        out.append("{P_} name was {N}.".format(P_=s["pos_cap"], N=s["N"]))
    if "{home}" not in opening and rng.random() < 0.75:
        out.append(rng.choice(_HOME).format(**s))
    for sentence in rng.sample(_HABIT, rng.choice((0, 1, 1, 2))):
        out.append(sentence.format(**s))
    for step in _PLOTS[rng.choice(list(_PLOTS))]:
        out.append(rng.choice(step).format(**s))
    out.append(rng.choice(_END).format(**s))
    return out


def _shape(rng, sentences):
    if rng.random() < 0.75:
        return " ".join(sentences)
    cut = rng.randrange(2, len(sentences) - 1)
    return " ".join(sentences[:cut]) + "\n\n" + " ".join(sentences[cut:])


def make_text(rng):
    return " ".join(compose(rng, slots(rng)))


_ASK = ["Tell me a story.", "Tell me a short story.", "Write a little story.", "Write a story.",
        "Please tell me a story.", "Can you tell me a story?", "Tell me a fairy tale.",
        "I want to hear a story.", "Write a short story for children.", "tell me a story"]
_ASK_ABOUT = ["Tell me a story about {x}.", "Write a story about {x}.",
              "Please tell me a short story about {x}.", "Can you write a little story about {x}?"]
_CONTINUE = ["Continue: {x}", "Continue this story: {x}", "Go on with this story: {x}",
             "Please continue: {x}", "{x}"]


def key_of(s):
    return f"story:{s['a_kind_hero']}:{s['N']}"


def make(rng):
    """A story as a chat answer: free, about a hero, or continuing a given beginning."""
    s = slots(rng)
    sentences = compose(rng, s)
    roll = rng.random()
    if roll < 0.4:
        user, answer = rng.choice(_ASK), _shape(rng, sentences)
        reasoning = f"I tell a story about {s['a_kind_hero']}."
    elif roll < 0.75:
        about = s["a_kind_hero"] if rng.random() < 0.5 else words.article(s["hero"])
        if rng.random() < 0.4:
            about += f" called {s['N']}"
        user, answer = rng.choice(_ASK_ABOUT).format(x=about), _shape(rng, sentences)
        reasoning = f"The story is about {about}."
    else:
        text = " ".join(sentences)
        if rng.random() < 0.6 and " there was" in text:
            cut = text.index(" there was") + len(" there was")
        else:
            cut = text.index(" ", rng.randrange(20, len(sentences[0])))
        user = rng.choice(_CONTINUE).format(x=text[:cut])
        answer, reasoning = text[cut + 1:], "I go on with the story."
    return Item("story", key_of(s), user, answer, reasoning=reasoning)


def make_raw(rng):
    """A story as plain text, for the completion endpoint."""
    s = slots(rng)
    return Item("story_raw", key_of(s), "", _shape(rng, compose(rng, s)))


def vocabulary():
    """Every word that a story can hold (lower case), for the check that generated ones are clean."""
    rng, seen = random.Random(11), set()
    for _ in range(6000):
        seen.update(w.lower() for w in re.findall(r"[A-Za-z]+", make_text(rng)))
    return seen
