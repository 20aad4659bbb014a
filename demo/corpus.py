"""The text that the demo model learns from: conversations without end, made from grammars, seeded.

The problem. A serving engine needs a model to be looked at, and a model needs text. This text is
made to be *checked*: nearly every question has one right answer, which a few lines of Python know
as well. A wrong position, mask or slot breaks counting and spelling at once, so a bug in the engine
can be read off the screen.

What this file keeps. Everything follows from a seed. A question is either for learning or for the
exam, never for both: `is_held_out` decides by a hash of what is asked (the pair of numbers, the
word, the list), so that no other wording of an exam question is learnt either. An answer is text,
except that `CUT` may stand in it: tokens end there, so that a word written backwards is made of
letters, not of whatever pieces the tokenizer happens to know.

To add a skill, write a function that makes a `Task`, give it a weight in `SKILLS`, and a check in
`eval.py`.

Where next. `stories.py` is the grammar of the stories. `train.py` makes the tokenizer and the
model, `eval.py` holds the exam.
"""

from __future__ import annotations

import random
import re
import zlib
from collections.abc import Callable, Iterator
from typing import NamedTuple

import stories
from stories import words

CUT = "\x1f"  # no token reaches across it, and no text keeps it
LETTERS = "abcdefghijklmnopqrstuvwxyz"
DAYS = words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
MONTHS = words(
    "January February March April May June July August September October November December"
)


class Task(NamedTuple):
    item: str | None  # what is asked, in whatever words; None: never in the exam
    prompt: str
    answer: str


def is_held_out(skill: str, item: str | None) -> bool:
    """One item in eight is for the exam."""
    return item is not None and zlib.crc32(f"{skill}: {item}".encode()) % 8 == 0


# --- words --------------------------------------------------------------------------------------

MORE_WORDS = words(
    """
    about above across after again air all along also always among angle animal answer any apple arm army around arrow
    art ask aunt autumn away axe baby back bad bag bake bank barn base bath beach bean beard beat beauty become before
    begin behind bell below belt bend best better beyond bird birth bite black blade blank blow blue board body bone
    born both bowl branch brave bread break breath breeze brief bring broad brown build burn bus busy call calm camp
    card care carry cart case catch cause cave certain chain chalk chance change charm cheap check cheese chest child
    choice circle city claim class clay clean clear clever climb close cloud coal coast cold color come common cook cool
    copper corn corner cost cotton count country cousin cover crack craft cream cross crowd crown cry curve cut damp
    danger dark dawn day deal dear deep desk dinner dirt dish doctor door doubt down draw dream dress drift drink drive
    drop dry dust each ear early earth east easy eat edge effort eight either empty end engine enjoy enough enter equal
    evening ever every exact eye face fact fair fall false family far farm fast fear feed feel fence few field fight
    fill final find fine finger finish fire firm first five flag flame flat flight float floor flow fly follow food foot
    force forest forget form forward four free fresh friend front fruit full fun future game gate gentle gift girl give
    glad glass globe glow gold good grain grand grass gray great green ground group grow guess guest guide hair half
    hand happen happy hard harvest hat head hear heart heat heavy height help here hide high hill history hold hole home
    honest honey hope hour house how huge human hundred hungry hurry idea inch ink inside iron island join joke joy
    judge juice jump just keep kind king kiss kitchen knee knife know lake land language large last late laugh law lead
    leaf learn leave left leg lesson letter level life lift light line list listen little live load local long look lose
    lost love low luck machine make many mark market matter meal mean measure meat meet melt member metal middle might
    mile milk mind minute mirror miss mix model moment money month moon more morning most mother motion mountain mouth
    move much mud music name narrow near neck need neighbor never new next night nine noise none noon north nose note
    nothing notice number oak ocean offer office often oil old once only open orange order other outside over own page
    pain paint pair paper parent park part party pass past path peace pen people perfect person piece place plain plan
    planet plant plate play please point poor post pot power present press pretty price print prize problem promise
    proof proud pull pupil pure push queen question quick quiet rain raise rare reach read ready real reason red rest
    rice rich ride right ring rise river road rock roof room root round row rule run safe salt same sand save say scale
    school science sea season seat second secret see seed seem sell send sense serve set seven shade shadow shake shape
    share sharp sheet shelf shine ship shoe shore short should shoulder shout show shut side sign silent silver simple
    since sing sister six size skin sky sleep slow small smart smell smile smoke smooth snow soft soil some son song
    soon sound soup south space speak special speed spend spring square stage stair stand star start state stay steam
    steel step stick still stone stop storm story strange stream street strong student study such sugar summer sun
    supper sure surprise sweet swim table tail take talk tall taste teach tell ten test than thank thick thin thing
    think third thought three time tiny today together tomorrow tongue tool top touch toward town trade train travel
    tree true trust try turn twelve twenty twice two under uncle until upon use usual valley value very view village
    visit voice wait walk wall want warm wash watch water wave way weak wear weather week weight well west wet wheat
    wheel when where while white whole why wide wild will win wind window winter wire wise wish with woman wonder wood
    word work world worry write yard year yellow young zero zone
    """
)


def all_words() -> list[str]:
    """The words of some hundred stories, the nouns, and the list above."""
    rng = random.Random("words")
    nouns = list(stories.NOUNS)
    text = " ".join(stories.story(rng, *rng.sample(nouns, 2), "long") for _ in range(400))
    return sorted({*re.findall(r"\b[a-z]{3,11}\b", text), *nouns, *MORE_WORDS})


WORDS = all_words()
NOUNS = list(stories.NOUNS)
NAMES = [name for name, _ in stories.NAMES]
STARTS = words(
    "b c d f g h j k l m n p r s t v w z bl br ch cl dr fl fr gl gr kn pl pr qu sh sl sn sp st th tr wh"
)
MIDDLES = words("a e i o u ai ea ee oa oo ou ie y")
ENDS = words("b ck d ff g l ll m n nd ng nt p r rd rn s sh ss st t th x zz le ly er ing ed")


def new_word(rng: random.Random, longest: int = 10) -> str:
    """A word that nobody has heard: from sounds, from another word and an ending, or from mere
    letters.

    Without these, a word that is one token could only be learnt by heart: whatever stands in a
    token must be met inside other words, too.
    """
    while True:
        kind = rng.random()
        if kind < 0.35:
            parts = [rng.choice(STARTS) + rng.choice(MIDDLES) for _ in range(rng.randint(1, 3))]
            word = "".join(parts) + rng.choice(["", rng.choice(ENDS)])
        elif kind < 0.88:
            word = rng.choice(WORDS)
            extra = rng.choice(
                [
                    rng.choice(ENDS),
                    rng.choice(LETTERS),
                    rng.choice(STARTS) + rng.choice(MIDDLES),
                    "s",
                ]
            )
            word = word + extra if rng.random() < 0.75 else extra + word
        else:
            word = "".join(rng.choice(LETTERS) for _ in range(rng.randint(3, 6)))
        if 3 <= len(word) <= longest and word not in WORDS:
            return word


def any_word(rng: random.Random, longest: int = 10) -> str:
    if rng.random() < 0.5:
        return new_word(rng, longest)
    while len(word := rng.choice(WORDS)) > longest:
        pass
    return word


# --- the skills ---------------------------------------------------------------------------------


def counting(rng: random.Random) -> Task:
    top = 20 if rng.random() < 0.5 else 100 if rng.random() < 0.9 else 130
    first = rng.randrange(top)
    last = (
        first
        + rng.choices([rng.randint(2, 12), rng.randint(13, 30), rng.randint(31, 80)], [14, 5, 1])[0]
    )
    numbers = list(range(first, last + 1))
    if rng.random() < 0.25:
        numbers.reverse()
        ask = rng.choice(
            [
                "Count down from {a} to {b}.",
                "Count backwards from {a} to {b}.",
                "Can you count down from {a} to {b}?",
            ]
        )
    else:
        ask = rng.choice(
            [
                "Count from {a} to {b}.",
                "Count from {a} to {b}.",
                "Count up from {a} to {b}.",
                "Can you count from {a} to {b}?",
                "Say the numbers from {a} to {b}.",
                "Write the numbers {a} to {b}.",
            ]
        )
    a, b = numbers[0], numbers[-1]
    return Task(f"{a} to {b}", ask.format(a=a, b=b), ", ".join(map(str, numbers)) + ".")


def alphabet(rng: random.Random) -> Task:
    a = rng.randrange(24)
    b = 25 if rng.random() < 0.3 else rng.randint(a + 1, 25)
    first, last = LETTERS[a], LETTERS[b]
    to_the_end = [
        "Say the alphabet from {a}.",
        "Say the alphabet from {a} on.",
        "Recite the alphabet from {a}.",
    ]
    part = [
        "Say the alphabet from {a} to {b}.",
        "Recite the alphabet from {a} to {b}.",
        "Write the letters from {a} to {b}.",
        "Which letters go from {a} to {b}?",
        "Can you say the letters {a} to {b}?",
    ]
    if a == 0 and b == 25 and rng.random() < 0.5:
        ask = rng.choice(["Say the alphabet.", "Recite the alphabet.", "Can you say the alphabet?"])
    else:
        ask = rng.choice(to_the_end if b == 25 and rng.random() < 0.7 else part)
    return Task(
        f"{first} to {last}", ask.format(a=first, b=last), ", ".join(LETTERS[a : b + 1]) + "."
    )


def calendar(rng: random.Random) -> Task:
    """Days end on Sunday and months in December unless another end is asked for; asked to, they go
    round."""
    kind, names = ("days", DAYS) if rng.random() < 0.4 else ("months", MONTHS)
    a, b = rng.randrange(len(names)), rng.randrange(len(names))
    if rng.random() < 0.4:  # from one to the next is easily taken for once around
        b = (a + rng.randint(1, 3)) % len(names)
    draw = rng.random()
    if draw < 0.12:
        step = rng.choice([1, -1])
        which = "after" if step == 1 else "before"
        ask = rng.choice(
            [f"What {kind[:-1]} comes {which} {{a}}?", f"Which {kind[:-1]} is {which} {{a}}?"]
        )
        answer = names[(a + step) % len(names)]
        return Task(None, ask.format(a=names[a]), f"{answer} comes {which} {names[a]}.")
    if draw < 0.35:
        b = len(names) - 1
        ask = rng.choice(
            ["Name the {k} from {a}.", "Say the {k} from {a}.", "List the {k} from {a} on."]
        )
        if a == 0:
            ask = rng.choice([ask, "Name all the {k}.", "What are the {k}?"])
    else:
        ask = rng.choice(
            [
                "Name the {k} from {a} to {b}.",
                "Say the {k} from {a} to {b}.",
                "List the {k} from {a} to {b}.",
                "Which {k} go from {a} to {b}?",
                "Can you name the {k} from {a} to {b}?",
            ]
        )
    chosen = [names[(a + i) % len(names)] for i in range((b - a) % len(names) + 1)]
    if len(chosen) == 1 and "{b}" in ask:
        return calendar(rng)
    return Task(
        f"{names[a]} to {names[b]}",
        ask.format(k=kind, a=names[a], b=names[b]),
        ", ".join(chosen) + ".",
    )


def spelling(rng: random.Random) -> Task:
    word = any_word(rng)
    ask = rng.choice(
        [
            "Spell the word {}.",
            "Spell the word {}.",
            "Spell {}.",
            "How do you spell {}?",
            "Can you spell the word {}?",
            "What are the letters of {}?",
        ]
    )
    return Task(word, ask.format(word), f"{'-'.join(word)}.")


def reversing(rng: random.Random) -> Task:
    """The answer spells the word first. To turn it round is then easy: a small model thinks best
    aloud."""
    word = any_word(rng, 6 if rng.random() < 0.75 else 9)
    ask = rng.choice(
        [
            "Reverse the word {}.",
            "Reverse the word {}.",
            "Reverse {}.",
            "Write {} backwards.",
            "Say {} backwards.",
            "What is {} spelled backwards?",
            "Can you turn the word {} around?",
        ]
    )
    return Task(word, ask.format(word), f"{'-'.join(word)} becomes {CUT.join(word[::-1])}.")


def repeating(rng: random.Random) -> Task:
    ask = rng.choice(
        [
            "Repeat: {}",
            "Repeat: {}",
            "Say this again: {}",
            "Repeat after me: {}",
            "Please repeat: {}",
        ]
    )
    if rng.random() < 0.75:
        text = sentence(rng)
    else:
        pick = [
            lambda: rng.choice(WORDS),
            lambda: rng.choice(NOUNS),
            lambda: new_word(rng),
            lambda: str(number(rng)),
        ]
        text = " ".join(rng.choices(pick, [5, 3, 2, 1])[0]() for _ in range(rng.randint(1, 10)))
    if rng.random() < 0.3:
        text = text[0].upper() + text[1:]
    text += rng.choice(["", ".", ".", ".", "!"])
    return Task(text, ask.format(text), text)


def number(rng: random.Random) -> int:
    return rng.randrange(10 ** rng.randint(1, 3))


VERBS = words(
    "sat stood slept danced waited sang hid fell played rested looked jumped ran walked laughed stayed"
)
WHERE = words("on under near behind beside above below inside by around over")
QUALITIES = words(
    """
    red blue green old new small big warm cold quiet loud soft bright dark slow quick happy sad round thin tiny grey
    golden heavy gentle clever brave lazy silver kind wet dry
    """
)


def sentence(rng: random.Random) -> str:
    """The cat sat on the mat, and its cousins."""

    def thing() -> str:
        if rng.random() < 0.15:
            return rng.choice(NAMES)
        quality = rng.choice(QUALITIES) + " " if rng.random() < 0.4 else ""
        noun = rng.choice(NOUNS)
        return rng.choice(["the ", "the ", "my ", "your ", "one "]) + quality + noun

    text = f"{thing()} {rng.choice(VERBS)} {rng.choice(WHERE)} {thing()}"
    if rng.random() < 0.3:
        text += f" {rng.choice(['and', 'while', 'because', 'until'])} {thing()} {rng.choice(VERBS)}"
    return text


def adding(rng: random.Random) -> Task:
    """With more than one digit, the ones come first: then the carry is on paper before it is
    needed."""
    a, b = (
        (rng.randrange(21), rng.randrange(21))
        if rng.random() < 0.7
        else (rng.randrange(100), rng.randrange(100))
    )
    ask = rng.choice(
        [
            "What is {a} + {b}?",
            "What is {a} + {b}?",
            "What is {a} plus {b}?",
            "How much is {a} plus {b}?",
            "How much is {a} + {b}?",
            "Add {a} and {b}.",
            "What do {a} and {b} make?",
            "{a} + {b} = ?",
        ]
    )
    low, high = sorted((a, b))
    ones = f"{a % 10} + {b % 10} = {a % 10 + b % 10}, so " if high > 9 else ""
    return Task(f"{low} + {high}", ask.format(a=a, b=b), f"{ones}{a} + {b} = {a + b}.")


def membership(rng: random.Random) -> Task:
    """The answer goes through the list, word by word, as far as it has to."""
    size = rng.randint(2, 8)
    source = rng.choices([NOUNS, WORDS, MONTHS, NAMES, None], [6, 3, 1, 1, 1])[0]
    items = rng.sample(source, size + 1) if source else [new_word(rng) for _ in range(size + 1)]
    wanted, members = items[0], items[1:]
    if is_in := rng.random() < 0.5:
        members[rng.randrange(size)] = wanted
    ask = rng.choice(
        [
            "Is {w} in this list: {l}?",
            "Is {w} in this list: {l}?",
            "Is {w} in the list {l}?",
            "Does this list have {w}: {l}?",
            "Is {w} one of these: {l}?",
            "Look for {w} in this list: {l}.",
        ]
    )
    seen = ", ".join(members[: members.index(wanted) + 1] if is_in else members)
    answer = (
        f"{seen}: yes, {wanted} is in the list."
        if is_in
        else f"{seen}: no, {wanted} is not in the list."
    )
    listed = ", ".join(members)
    return Task(f"{wanted} in {listed}", ask.format(w=wanted, l=listed), answer)


def story(rng: random.Random) -> Task:
    first, second = rng.sample(NOUNS, 2)
    kinds = dict(stories.NOUNS)
    if rng.random() < 0.06:  # a noun from nowhere: whatever is asked for, it must turn up
        second = any_word(rng)
        kinds[second] = "thing"
    if first == second:
        return story(rng)
    length = rng.choices(stories.LENGTHS, [5, 4, 3])[0]
    hero = next((noun for noun in (first, second) if kinds[noun] != "thing"), None)
    name = rng.choice(stories.names_for(hero))[0] if hero and rng.random() < 0.15 else ""
    text = stories.story(rng, first, second, length, kinds, name)
    named = "short" if length == "short" else "long" if length == "long" else ""
    kind = stories.article(f"{named} story".strip())
    one, two = (
        stories.article(noun) + (f" named {name}" if name and noun == hero else "")
        for noun in (first, second)
    )
    ask = rng.choice(
        [
            "Tell me {k} about {a} and {b}.",
            "Tell me {k} about {a} and {b}.",
            "Tell {k} about {a} and {b}.",
            "Write {k} about {a} and {b}.",
            "Can you tell me {k} about {a} and {b}?",
            "I would like {k} about {a} and {b}.",
            "Make up {k} about {a} and {b}.",
            "{K} about {a} and {b}, please.",
        ]
    )
    item: str | None = " ".join(sorted((first, second)))
    if rng.random() < 0.12:  # the rest is left to the model
        ask, item = rng.choice(
            [
                ("Tell me {k} about {a}.", None),
                ("Write {k} about {a}.", None),
                ("Tell me {k}.", None),
            ]
        )
    return Task(item, ask.format(k=kind, K=kind[0].upper() + kind[1:], a=one, b=two), text)


class Fact(NamedTuple):
    questions: tuple[str, ...]
    answer: str


# What one may ask about, other ways to ask, and after the "=" what is true.
FACTS_TEXT = """
a slot | What does slot mean? | What are slots? | Explain slots. | How many requests fit in a slot?
= A slot is the place of one request in the slab. It holds the keys and values of its tokens, from its admission to its
end.

TTFT | What does TTFT mean? | What is the time to first token? | How long do I wait for the first token?
= TTFT is the time to first token: how long you wait from sending a prompt until the first token of the answer.

batching | Why batch? | Why do you batch? | What is batching good for? | Why is batching fast? | Why use batches?
= A step reads all the weights anyway. Eight requests can share that one reading, so eight tokens cost little more than
one.

the slab | What is a slab? | What does slab mean? | What is the KV slab? | How large is the slab?
= The slab is the memory for all keys and values. It is allocated once and cut into slots of equal length.

prefill | What does prefill mean? | What happens in prefill? | How is a prompt read?
= Prefill reads the prompt. Its tokens are known, so a whole chunk of them goes through the model at once.

decode | Explain decoding. | What does decode mean? | What happens in decode? | How is the answer written?
= Decode writes the answer, one token per step, because each token depends on the one before it.

continuous batching | How does continuous batching work? | What does continuous mean? | Why is it called continuous?
= In continuous batching a request leaves its slot the moment it ends, and the next one takes the slot at once. Nobody
waits for the slowest.

static batching | How does static batching work? | What does static mean? | What is wrong with static batching?
= Static batching fills all slots, then waits until every answer has ended before it starts the next batch. Short
answers leave their slots empty meanwhile.

the serial policy | What does serial mean? | Explain serial. | How does serial serving work?
= Serial means one request at a time. The others wait, and most of the machine waits with them.

the KV cache | What is a KV cache? | Why is there a KV cache? | What are keys and values for?
= The KV cache keeps the keys and values of every token seen so far, so that no token is computed twice.

a token | What are tokens? | Explain tokens. | What does token mean? | Is a token a word?
= A token is a piece of text with a number: a word, a part of a word, a letter or a mark.

nanobatch | What is this project? | What does nanobatch do? | What is nanobatch for? | What program is this?
= nanobatch is an engine that serves language models. You can read it in an afternoon and watch it while it runs.

a chunk | What are chunks? | What does chunk mean? | Why are prompts cut into chunks? | Why is my prompt cut up?
= A chunk is a piece of a prompt. A long prompt is read chunk by chunk, so that others can decode in between.

a step | What happens in a step? | What does a step do? | What are steps?
= A step is one turn of the engine: plan, run, commit. Each slot gets at most one new token in it.

a plan | What does the plan say? | What is in a plan? | Who makes the plan?
= A plan says who enters which slot, which chunks are read and which slots decode. It touches no array.

commit | What does commit mean? | What happens in commit? | What does commit do?
= Commit takes the new tokens, hands the text to whoever listens, and frees the slots of those that have ended.

run-ahead | What does run-ahead mean? | How does run-ahead work? | Why run ahead?
= Run-ahead starts the next step before the tokens of this one have been read, so that Python works while the device
works.

the scheduler | What is a scheduler? | What does the scheduler do? | What is the scheduler for? | Who decides who runs?
= The scheduler decides who runs next. It looks at the queue and the slots, and answers with a plan.

the queue | Why is there a queue? | What does the queue do? | Why does my request wait? | Why do requests wait?
= A request waits in the queue while all slots are taken. First come, first served.

prefix reuse | How does prefix reuse work? | What does reused mean? | Why is a prefix reused? | When is a prompt reused?
= A freed slot remembers its tokens. A prompt that begins in the same way takes them over and skips that work.

greedy decoding | What does greedy mean? | How does greedy decoding work? | Why is it called greedy?
= Greedy decoding always takes the most likely token. It is what you get at temperature 0.

temperature | What does temperature do? | What does temperature mean? | What is the temperature for?
= Temperature says how freely tokens are drawn. At 0 the likeliest always wins; higher gives rarer ones a chance.

attention | What does attention do? | What does attention mean? | How does attention work?
= In attention a token looks back at all tokens before it and takes a mixture of what it finds.

MLX | What does MLX do? | What is MLX for? | Who makes MLX?
= MLX is Apple's library for arrays. nanobatch computes with it, on a Mac or on Linux.

throughput | What does throughput mean? | How is throughput measured? | How fast is it?
= Throughput is how many tokens come out in a second, over all requests together.

a policy | Which policies are there? | Explain the policies. | What does the policy decide? | Name the policies.
= There are three policies: continuous, static and serial. They differ only in when a request may enter a slot.

parity | What does parity mean? | How right is nanobatch? | Is nanobatch correct?
= Parity means: token for token the same answers as mlx-lm. The tests check it.

| Who are you? | What are you? | Who am I talking to? | Introduce yourself. | What is your name?
= I am the demo model of nanobatch, a very small Llama. I tell stories, count, spell and explain slots.

| What can you do? | What do you know? | How can you help? | Help. | What should I ask you?
= I can tell stories, count, say the alphabet, spell, reverse and repeat words, add, name days and months, look through
lists, and explain how I am served.

| Hello! | Hi! | Hello. | Hey there! | Good morning!
= Hello! Ask me for a story, or let me count.

| Thank you! | Thanks! | Thank you. | That was nice. | Well done!
= You are welcome!

| Goodbye! | Bye! | See you. | Good night! | Goodbye.
= Goodbye! My slot is free for the next one.

| How are you? | How is it going? | Are you well? | How do you feel? | All well?
= Warm and well fed.
"""
WAYS_TO_ASK = (
    "What is {}?",
    "What is {} in nanobatch?",
    "What is meant by {}?",
    "Explain {}.",
    "Can you explain {}?",
    "Explain to me what {} is.",
    "Define {}.",
    "Describe {}.",
    "Tell me about {}.",
    "Do you know what {} is?",
)


def read_facts(text: str) -> list[Fact]:
    facts = []
    for part in text.strip().split("\n\n"):
        asked, answer = " ".join(part.split()).split(" = ")
        subject, *others = (way.strip() for way in asked.split("|"))
        facts.append(
            Fact((*(way.format(subject) for way in WAYS_TO_ASK if subject), *others), answer)
        )
    return facts


FACTS = read_facts(FACTS_TEXT)


def facts(rng: random.Random) -> Task:
    fact = rng.choice(FACTS)
    question = rng.choice(fact.questions)
    return Task(question, question, fact.answer)


ELSEWHERE = (
    """
What is the capital of {x}?|Who wrote {x}?|Why is the {n} {q}?|How do I cook {n} soup?|Write a poem about {a}.
Translate {w} into French.|What is the meaning of {w}?|Who was {x}?|How far is {x} from {y}?|What is {n} made of?
Write a program that sorts {n}s.|How old is {x}?|What is {i} times {j}?|Where is {x}?|Is {x} bigger than {y}?
Draw {a}.|What is the weather in {x}?|How much does {a} cost?|Explain {w}.|Who is the king of {x}?
Give me advice about my {n}.|What should I eat in {x}?|How does a {n} work?|Tell me a joke about {a}.|Who won in {x}?
""".replace("\n", "|")
    .strip("|")
    .split("|")
)
NAMES_ELSEWHERE = words(
    """
    France Paris Rome Spain London Hamlet Japan Berlin Mars China Oslo Peru Texas Newton Chopin Einstein Norway Kenya
    Boston Vienna Cairo India Brazil Athens Canada Egypt
    """
)


def elsewhere(rng: random.Random) -> Task:
    """What it cannot know, it says so."""
    noun, (x, y) = rng.choice(NOUNS), rng.sample(NAMES_ELSEWHERE, 2)
    form, quality, word = rng.choice(ELSEWHERE), rng.choice(QUALITIES), any_word(rng)
    a, i, j = stories.article(noun), number(rng), number(rng)
    prompt = form.format(x=x, y=y, n=noun, a=a, q=quality, w=word, i=i, j=j)
    return Task(
        prompt,
        prompt,
        "That is more than I know. I am a very small model. Ask me for a story, or let me count.",
    )


# name -> (how to make one, share of the questions)
SKILLS: dict[str, tuple[Callable[[random.Random], Task], float]] = {
    "story": (story, 30),
    "counting": (counting, 8),
    "alphabet": (alphabet, 3),
    "calendar": (calendar, 7),
    "spelling": (spelling, 12),
    "reversing": (reversing, 9),
    "repeating": (repeating, 8),
    "adding": (adding, 9),
    "membership": (membership, 14),
    "facts": (facts, 8),
    "elsewhere": (elsewhere, 2),
}


def ask(rng: random.Random, skill: str, exam: bool = False) -> Task:
    """One question of a skill, for the exam or for learning."""
    make = SKILLS[skill][0]
    while True:
        task = make(rng)
        if is_held_out(skill, task.item) == exam:
            return task


# --- conversations ------------------------------------------------------------------------------


class TrainingText(NamedTuple):
    """Messages as a chat template takes them, or, if `plain`, a text without any template."""

    messages: list[dict[str, str]]
    plain: bool = False


SYSTEMS = (
    "You are a helpful assistant.",
    "You are a friendly storyteller.",
    "Answer in few words.",
    "You are the demo model of nanobatch.",
    "Be kind and brief.",
)


def as_people_type(rng: random.Random, prompt: str) -> str:
    """Without the capital, without the full stop, with a please."""
    if rng.random() < 0.06 and prompt[-1] == "." and ":" not in prompt:
        prompt = rng.choice([f"{prompt[:-1]}, please.", f"Please {prompt[0].lower()}{prompt[1:]}"])
    if rng.random() < 0.12:
        prompt = prompt[0].lower() + prompt[1:]
    if rng.random() < 0.12 and prompt[-1] in ".?" and ":" not in prompt:
        prompt = prompt[:-1]
    return prompt


def conversation(rng: random.Random) -> TrainingText:
    """One to eight turns; sometimes a system message before them; sometimes no chat at all."""
    skills, weights = list(SKILLS), [weight for _, weight in SKILLS.values()]
    if rng.random() < 0.04:
        return TrainingText(
            [{"role": "assistant", "content": ask(rng, "story").answer}], plain=True
        )
    plain = rng.random() < 0.06
    turns = (
        1
        if plain or rng.random() < 0.6
        else rng.randint(2, 4)
        if rng.random() < 0.9
        else rng.randint(5, 8)
    )
    messages = (
        [{"role": "system", "content": rng.choice(SYSTEMS)}]
        if not plain and rng.random() < 0.06
        else []
    )
    for skill in rng.choices(skills, weights, k=turns):
        task = ask(rng, skill)
        messages.append({"role": "user", "content": as_people_type(rng, task.prompt)})
        messages.append({"role": "assistant", "content": task.answer})
    return TrainingText(messages, plain)


def conversations(seed: str) -> Iterator[TrainingText]:
    """Without end. The same seed gives the same text."""
    rng = random.Random(seed)
    while True:
        yield conversation(rng)
