"""Endless short stories from a grammar: the training stories of the demo model.

The problem: given two nouns and a length ("a fox and a lantern, short"), generate a story that one
can read aloud. A model of a few million parameters writes no better than its training text, so the
quality has to come from this file.

How a story is made. The nouns decide the cast: an animal or a person becomes the hero, a thing becomes
the subject, and a second animal or person becomes the friend; for two things a child is invented. The
cast decides the family of plots. A plot is a text of beats. A line that begins with a digit begins a
beat, a line that begins with "| " is an alternative wording, and any other line continues the line
above. The digit is the beat's depth: 1 is told in every story, 2 in medium and long ones, 3 only in
long ones, and a few of the deepest beats are left out at random. So each plot has to make sense at
all three depths, and a beat must not depend on another of the same depth, unless both are 1s.

In a wording, `[a|b]` is a random choice, and `{field}` is a word of this story: it is drawn once and
then kept, so that `{place}` stays the same place to the end. A field's name may end in a 2, for a
different draw from the same list, or begin with a capital, to capitalize the value. `{he} {him}
{his}` are the hero's pronouns, `{they} {them} {their}` are the friend's (she, her, her). Fields may
contain fields: `{owns}` is a complete first sentence. Verbs are in the past tense, which needs no
agreement; "a" becomes "an" automatically.

A noun has habits (`habit`): a fox usually has the same name, lives in the same place, and appears in
the same kind of story. A greedy model generates what it saw most often, so without habits all its
stories would begin in the same way. Names need habits for another reason: with random names, the model
could not tell one name from another, and a fox that was introduced as Ruby became Ada.

`story` draws until a story fits: the length is right, both nouns occur at least twice, and the first
noun is in the first sentence.

To add a plot, write one more text under FOUND, OWNED, FRIENDS or PAIRS. To add a noun, add it to a
list below.
"""

import random
import re
import zlib
from collections.abc import Mapping, Sequence
from itertools import chain


def words(text: str) -> tuple[str, ...]:
    """Split a text into words."""
    return tuple(text.split())


ANIMALS = words(
    """
    ant badger bear beaver bee beetle butterfly cat cow cricket crow deer dog donkey dragon duck elephant fox frog goat
    goose hamster hedgehog hen horse kitten ladybug lamb lion mole monkey mouse otter owl panda parrot penguin pig pony
    puppy rabbit raccoon robin sheep snail sparrow squirrel swan tiger toad tortoise turtle unicorn wolf
    """
)

PERSONS = words(
    """
    astronaut baker beekeeper blacksmith boy captain carpenter clown cook dancer doctor explorer farmer gardener girl
    inventor juggler king knight librarian magician nurse painter pilot pirate poet potter prince princess queen robot
    sailor shepherd singer tailor teacher tinker weaver witch wizard
    """
)

# The use of each thing. Things that tear are in SOFT, and natural things, which cannot be mended, in WILD.
HARD = {
    "basket": "gather berries",
    "bell": "call everyone to supper",
    "boat": "cross the river",
    "bottle": "carry cool water",
    "bowl": "eat warm porridge",
    "box": "keep little treasures",
    "broom": "sweep the steps",
    "brush": "paint the fence",
    "bucket": "water the garden",
    "button": "close a warm coat",
    "candle": "light the dark stairs",
    "chair": "rest by the stove",
    "clock": "tell the time",
    "comb": "look neat on Sundays",
    "compass": "find the way north",
    "crown": "look grand at parties",
    "cup": "drink warm milk",
    "doll": "play on rainy days",
    "drum": "beat a merry march",
    "fiddle": "play for the dancers",
    "flute": "play a soft tune",
    "guitar": "play slow songs",
    "hammer": "build a bench",
    "harp": "play sweet songs",
    "helmet": "feel safe and brave",
    "horn": "greet the sun",
    "jar": "keep plum jam",
    "jug": "pour cold milk",
    "kettle": "make hot tea",
    "key": "open the garden gate",
    "ladder": "reach the highest pears",
    "lamp": "read in the evening",
    "lantern": "light the path",
    "magnet": "find lost pins",
    "marble": "play on the doorstep",
    "mask": "act in funny plays",
    "mirror": "practice a friendly smile",
    "mug": "drink hot cocoa",
    "needle": "sew on patches",
    "pan": "fry pancakes",
    "pen": "write long letters",
    "pencil": "draw funny faces",
    "pipe": "blow soap bubbles",
    "plate": "serve cake",
    "pot": "cook good soup",
    "puppet": "put on little shows",
    "rake": "gather the leaves",
    "ring": "remember an old friend",
    "shield": "keep off the rain",
    "shovel": "clear the snow",
    "sled": "slide down the hill",
    "spade": "plant turnips",
    "spoon": "stir the soup",
    "stool": "sit by the stove",
    "teapot": "pour tea for guests",
    "telescope": "look at the moon",
    "thimble": "sew without a sting",
    "top": "play on the kitchen floor",
    "trumpet": "wake the whole street",
    "wagon": "bring the pumpkins home",
    "wand": "lead the singing",
    "watch": "be on time",
    "wheel": "spin soft wool",
    "whistle": "call friends from far away",
}
SOFT = {
    "apron": "keep clean in the kitchen",
    "bag": "bring apples home",
    "ball": "play catch",
    "blanket": "sleep warm",
    "book": "learn new stories",
    "cap": "keep the wind off",
    "carpet": "make the room cozy",
    "cloak": "stay warm on the road",
    "coat": "stay warm in winter",
    "cushion": "nap on the porch",
    "fan": "stay cool in summer",
    "flag": "wave to the ships",
    "hammock": "rest under the trees",
    "hat": "keep off the sun",
    "kite": "play with the wind",
    "letter": "remember kind words",
    "map": "find the right road",
    "mitten": "throw snowballs",
    "net": "catch falling apples",
    "painting": "remember the sea",
    "pillow": "have good dreams",
    "purse": "save pennies",
    "quilt": "keep off the cold",
    "ribbon": "tie up presents",
    "rope": "tie up the boat",
    "sack": "carry flour",
    "scarf": "keep warm in the wind",
    "sock": "keep warm at night",
    "sweater": "stay warm on cold days",
    "tent": "sleep under the stars",
    "umbrella": "stay dry in the rain",
}
WILD = {
    "crystal": "catch the morning light",
    "feather": "tickle sleepy friends",
    "leaf": "mark the page of a book",
    "pearl": "remember the sea",
    "pebble": "play hopscotch",
    "pinecone": "guess the weather",
    "shell": "hear the sea",
    "stick": "draw in the sand",
    "stone": "hold the door open",
}
USES = HARD | SOFT | WILD
THINGS = tuple(USES)

NOUNS = (
    dict.fromkeys(ANIMALS, "animal")
    | dict.fromkeys(PERSONS, "person")
    | dict.fromkeys(THINGS, "thing")
)
GENDER = dict.fromkeys(words("boy king prince wizard"), "he")
GENDER |= dict.fromkeys(words("cow girl goose hen princess queen witch"), "she")

HE = words(
    "Ben Bo Carl Dan Eli Finn Gus Hugo Ivo Jack Jon Leo Max Milo Ned Noah Otto Paul Sam Theo Tom Will"
)
SHE = words(
    "Ada Anna Bella Clara Dora Ella Emma Fay Ida June Lily Lucy Maya Mia Nell Nia Nora Pia Rosa Ruby Tess Zoe"
)
NAMES = [(name, "he") for name in HE] + [(name, "she") for name in SHE]
PRONOUNS = {"he": ("he", "him", "his"), "she": ("she", "her", "her")}

LENGTHS = ("short", "medium", "long")
SENTENCES = {"short": (3, 5), "medium": (5, 11), "long": (10, 21)}
# Nine random stories in ten are within these limits; `story` redraws the others
WORDS = {"short": (35, 78), "medium": (78, 145), "long": (145, 240)}

# Fields shared by several plots: first words, then complete sentences.
FIELDS = {
    "adj": words("red blue green yellow small little pretty fine lovely plain"),
    "trait": words(
        "kind curious cheerful shy patient brave clever gentle quiet young careful merry friendly"
    ),
    "helper": ("miller", "peddler", "neighbor", "old woman", "old man", "traveler"),
    "family": ("grandmother", "grandfather", "uncle", "aunt"),
    "food": (
        "bread and honey",
        "warm soup",
        "apple pie",
        "berry cake",
        "potato soup",
        "toast with plum jam",
        "pear cake",
        "noodle soup",
    ),
    "day": (
        "one morning",
        "one fine morning",
        "one bright day",
        "one Monday",
        "early one morning",
        "one day in spring",
        "one day in autumn",
        "one market day",
        "one quiet day",
        "one Sunday",
    ),
    "place": (
        "the river",
        "the old mill",
        "the stone bridge",
        "the pond",
        "the well",
        "the tall oak",
        "the garden wall",
        "the crossroads",
        "the church",
        "the apple tree",
    ),
    "where": (
        "in a small house by the water",
        "at the edge of a quiet wood",
        "on the sunny side of a hill",
        "near a little railway station",
        "at the end of a long lane",
        "in a village by the sea",
        "behind a field of corn",
        "between two green hills",
    ),
    "owns": (
        "{Where} lived a {trait} {hero} named {name} who had a {adj} {thing}.",
        "Once upon a time there was a {trait} {hero} named {name}, and {he} had a {adj} {thing}.",
        "There was once a {trait} {hero} named {name} whose dearest treasure was a {adj} {thing}.",
        "Of all the things in the house, {name} the {hero} loved {his} {adj} {thing} best.",
        "Everyone in the village knew {name} the {hero} and {his} {adj} {thing}.",
        "A {adj} {thing} had the best place in the home of a {trait} {hero} named {name}.",
        "No {hero} was ever prouder of a {adj} {thing} than {name}.",
        "{Name} was a {trait} {hero}, and {his} {adj} {thing} was the pride of the house.",
    ),
    "useline": (
        "Every day {he} used it to {use}.",
        "It was not new, but with its help {he} could {use}, and that was enough.",
        "Nothing else was half as good when {he} wanted to {use}.",
        "It had been a present from {his} {family}, and {he} used it to {use}.",
        "{His} {family} had once used it to {use}, and now {he} did the same.",
    ),
    "finds": (
        "{Day} a {trait} {hero} named {name} found a {adj} {thing} by {place}.",
        "Once upon a time a {trait} {hero} named {name} found a {adj} {thing} in the grass by {place}.",
        "A {adj} {thing} lay by {place}, and a {trait} {hero} named {name} was the first to see it.",
        "Nobody knew how the {adj} {thing} had come to {place}, but {name} the {hero} found it there.",
        "{Name} the {hero} was on the way to market when {he} saw a {adj} {thing} by {place}.",
        "{Day}, when the grass was still wet, a {hero} named {name} found a {adj} {thing} by {place}.",
    ),
    "meets": (
        "{Where} lived a {trait} {hero} named {name}, and next door lived a {friend} named {pal}.",
        "Once upon a time there were two neighbors, a {hero} named {name} and a {friend} named {pal}.",
        "{Name} was a {trait} {hero}, and {pal}, who lived next door, was a {trait2} {friend}.",
        "This is the story of {name} the {hero} and a {trait} {friend} named {pal}, who lived in the same street.",
        "There was once a {trait} {hero} named {name}, and the house next door belonged to {pal} the {friend}.",
        "Long ago a {trait} {hero} named {name} lived next door to a {trait2} {friend} named {pal}.",
    ),
    "weather": (
        "The sun was warm, and bees hummed in the clover.",
        "A soft wind moved the grass like water.",
        "White clouds sailed over the hills like sheep.",
        "The air smelled of [hay|apples|wild mint].",
        "High up, a lark was singing as if it were paid by the note.",
        "The whole valley lay [still|quiet] and golden.",
    ),
    "rest": (
        "At noon {he} sat down in the shade and ate some bread and cheese.",
        "{He} rested for a while on a log and watched the clouds go by.",
        "Halfway there {he} stopped at a [spring|stream] for a long, cold drink.",
        "When {he} grew tired, {he} sang a marching song, and the road felt shorter.",
    ),
    "chat": (
        '"A fine day for a walk," said a {helper2} at the gate. "A fine day for anything," said {name}.',
        '"Where are you going so fast?" asked a {helper2}. "I will tell you when I come back," said {name}.',
        '"You look busy," said a {helper2} on the road. "I am," said {name}, "but never too busy to say hello."',
        '"Will it rain?" asked a {helper2}. "Only if we both forget to look up," said {name} with a smile.',
    ),
    "supper": (
        "For supper there was {food}, and nothing had ever tasted better.",
        "That evening {name} ate {food} by the [stove|fire|window].",
        "There was {food} for supper, and {name} took a second helping.",
        "The kitchen smelled of {food} that evening.",
    ),
    "feast": (
        "For supper they shared {food}, and nothing had ever tasted better.",
        "That evening they ate {food} together by the [stove|fire|window].",
        "There was {food} for supper, and both of them took a second helping.",
        "They sat down together to {food} and talked until [the cups were cold|the sun went down].",
    ),
    "night": (
        "Outside, the stars came out one by one.",
        "Later the moon looked in at the window.",
        "Outside, the wind lay down and went to sleep.",
        "Night came softly over the roofs.",
        "Far away an evening bell rang, and then all was still.",
    ),
}

# One hero, and a thing that the hero finds or gets.
FOUND = {
    "the owner": """
1 {finds}
2 "Somebody must be missing this," {he} said.
| {He} liked it at once, but {he} knew that it [belonged to somebody else|was not {his}].
2 {He} knocked at every door in the [lane|street], but nobody had lost a {thing}.
| {He} asked at the [bakery|school|post office], and at every house, but all of them shook their heads.
3 "Then keep it," said a {helper}. "I would rather find the owner," said {name}.
| A {helper} offered [three|five] coins for it, but {name} said no and went on.
3 {weather}
3 {rest}
3 {chat}
1 At the last house {name} heard [crying|a sad sigh] behind the door, and there sat a child who had lost a {thing}.
| In the last street {he} met a child who was looking under every bush for a lost {thing}.
| Then {he} saw a child by the road, staring sadly at a drawing of a {thing}.
2 "Is this what you are looking for?" asked {name}.
| "I think this wants to go home with you," said {name}.
3 The child's eyes grew as round as plates. "That was my grandmother's," said the child, "and I need it to {use}."
| "You found it!" cried the child. "Now I can {use} again, just as my grandmother did."
1 The {hero} put it into the arms of the child, and felt richer than any king.
| The child hugged it, and then {name}, and no treasure had ever made the {hero} so happy.
| The {hero} gave it back. "Thank you!" said the child, and {name} felt as warm as a stove inside.
3 They sat on the step together and ate {food}.
| The child's mother brought out {food} for all of them.
3 Then {name} said goodbye, and the road home seemed short.
| It was late when {he} turned for home, and the child stood waving at the gate.
1 {He} went home with [empty pockets|nothing to carry] and a full heart.
| {He} had lost a {thing} that day, and found a friend.
| On the way home {he} whistled, for it is good to put things right.
""",
    "what is it for": """
1 {finds}
1 {He} had never seen a {thing} before. "What is it for?" {he} wondered.
| Now, this {hero} had never seen such a thing in all {his} life.
| "What a strange thing!" said {name}, who had never seen a {thing} in [all {his} days|{his} life].
2 First {he} tried to wear it on {his} head, but it [fell off|slid off] at once.
| First {he} tried to sing to it, but it did not sing back.
| First {he} asked it politely, but it did not answer.
2 Then {he} [put it in the sun|buried it in the garden] to see if it would grow, and it did not.
| Then {he} sat beside it all [morning|afternoon] to see if it would do something by itself.
3 "It is a chimney for a very small house," said one neighbor. "It is a bed for a beetle," said another.
| "It is surely a kind of cheese," said a {helper2}, who had poor eyes. "I do not think so," said {name}.
3 Everybody in the village came to look, and everybody had a different idea.
| Soon half the village stood around it, and nobody could agree.
3 {weather}
3 {Name} thought so hard that {he} forgot {his} lunch.
| All night {he} turned the question over like a pancake.
3 "Somebody made this with care," {he} told {him}self, "so it must be good for something."
| "There is no hurry," {he} told {him}self. "A good question can wait for its answer."
1 At last a {helper} came by and laughed kindly. "My dear, with that you can {use}!"
| At last {he} asked a {helper}, who said, "Why, that is for people who want to {use}."
| In the end a {helper} took the {thing} and showed {him} how to {use}.
2 {Name} tried it at once, and it worked.
| "Show me once more," said {name}, and soon {he} could do it alone.
3 {He} was so pleased that {he} did it three times before supper.
| All the neighbors clapped, and some of them wanted a turn.
3 {supper}
3 {night}
1 From then on the {hero} used the {thing} every [day|week], and still thought it a little strange and wonderful.
| The {hero} laughed for a long time, and the {thing} was never idle again.
| "All I had to do was ask," said the {hero}, and {he} took the {thing} home with a smile.
""",
    "a gift that travels on": """
1 {Name} the {hero} was given a {adj} {thing} [on {his} birthday|for {his} birthday|as a winter present].
| On {his} birthday, a {trait} {hero} named {name} got a {adj} {thing} from {his} {family}.
| A {adj} {thing} came in the mail for a {trait} {hero} named {name}.
| Once upon a time somebody left a {adj} {thing} at the door of a {hero} named {name}.
2 There was a note with it: "Use it well, and when you can, pass it on."
| {His} {family} had tied a note to it: "Keep it as long as you need it, and no longer."
2 All [spring|summer|winter] {he} used it to {use}, and [every day|every time] {he} was happy.
| For a whole year {he} used it to {use}.
3 {He} kept it clean, and {he} showed it to every guest.
| {He} took such care of it that it looked as good as new.
3 "You are lucky," said a {helper2}. "I know," said {name}, "and I try not to forget it."
| Sometimes {he} read the note again and wondered when the right day would come.
3 {weather}
1 {Day} {he} met a {helper} who had nothing in the world, and the {hero} thought for a long time.
| Then {he} heard that {his} friend {pal} was sick and sad, and {he} knew what to do.
| But {day} a new neighbor named {pal} moved in, with no {thing} and no friends.
1 {Name} gave the {thing} away with both a sigh and a smile.
| "This was a gift to me," said {name}, "and now it is a gift from me."
| So {name} tied a ribbon around the {thing} and left it at the right door.
2 It was hard for a minute, and after that it was easy.
| At home the shelf looked empty, but {he} did not feel empty at all.
3 {supper}
3 The winter came and went, and the snow melted from the roofs.
| Weeks went by, and the leaves turned yellow and fell.
3 Every now and then {he} wondered whether somebody was using it that very minute to {use}.
| When people asked where it was, {he} only said, "It is on its way."
3 One morning there was a knock, and there stood a stranger with {food2}. "From a friend," the stranger said.
| Then a letter came from a far town. "It has been here too," the letter said, "and it made us glad."
1 And who knows where that {thing} is now, for the {hero} told everyone to pass it on.
| They say the {thing} is still going from hand to hand, and it all began with one {hero}.
| Years later the {hero} saw the {thing} in a far town, in happy hands, and walked on with a light step.
""",
    "a wish": """
1 {finds}
1 When {he} rubbed off the dust, a tiny voice in it said, "You may have one wish."
| "You have found me," said the {thing} in a tiny voice, "so you may make one wish."
| "Make a wish," it whispered, "but only one, and not too fast."
2 {Name} looked [left and right|behind {him}], but there was nobody else on the road.
| A talking {thing} was a new thing to {him}, so first {he} said good morning.
2 {He} thought of gold, but gold was heavy, and of a castle, but castles were cold.
| {He} thought of a [palace|castle], but who would sweep it?
| {He} thought of a mountain of cake, but {he} was not that hungry.
3 {weather}
3 "Take your time," said the little voice. "I have waited here for a hundred years."
| "Most people ask for gold," said the voice, "and then they ask me where to hide it."
3 {Name} carried it home and put it on the table, and all evening {he} thought.
| {Name} sat down on a stone and thought until the sun was low.
3 {He} made a list of wishes, and then {he} crossed them out, one after the other.
| Each wish looked fine at first, and each one looked smaller when {he} turned it around.
1 Then {he} saw how dry the fields were, and the {hero} wished for rain for everyone.
| Then {he} thought of {pal}, who was far away, and the {hero} wished for {them} to come home.
| Then {he} heard a child coughing next door, and the {hero} wished for the child to be well.
2 "That is a good wish," said the voice, "and I have heard a great many."
| "Nothing for yourself?" asked the voice. "That is for myself too," said {name}.
3 There was a flash like a [spark|small star], and a smell of cinnamon.
| The candle on the table went out, and came back on again.
1 By the next day it had come true, and the {thing} never spoke again.
| The wish came true before [supper|sunset], and from then on the {thing} was silent.
3 {supper}
3 {Name} used it to {use}, just like any other {thing}.
| People only saw a {adj} {thing}, and {name} never told them.
3 {night}
2 {Name} kept it on the shelf and dusted it every Sunday, just to be polite.
| But {name} always said good night to it, because one never knows.
| {Name} did not mind, for {he} had nothing left to wish for.
""",
    "a secret": """
1 A {trait} {hero} named {name} had a secret, and the secret was a {adj} {thing}.
| Nobody knew that {name} the {hero} kept a {adj} {thing} [under the bed|behind the stove|in the attic].
| "I will tell nobody," said a {hero} named {name}, and {he} hid the {adj} {thing} [in the attic|under the stairs].
| Under the floor of {his} house, a {hero} named {name} had hidden a {adj} {thing}.
2 {He} had found it by {place}, and it was so fine that {he} was afraid to lose it.
| {His} {family} had given it to {him}, and {he} was afraid that someone would take it.
2 Only at night, when the curtains were closed, did {he} take it out to {use}.
| {He} took it out only when nobody was near, and {he} never stayed long.
3 When guests came, {he} sat very still and hoped that they would leave soon.
| "What do you do all evening?" asked a {helper}. "Nothing at all," said {name}, and turned red.
3 After a while nobody came to the house anymore.
| By and by the neighbors stopped knocking at the door.
3 {weather}
1 But a secret is a lonely thing, and soon the {hero} had nobody to talk to.
| But a treasure that nobody sees is only half a treasure, and the {hero} grew sadder every week.
| But the longer {he} kept the secret, the heavier it felt, and the {hero} could not sleep.
3 At the window {he} could hear the others laughing in the street.
| {He} looked at it every evening, and every evening it seemed to shine a little less.
1 {Day} {he} took a deep breath and showed the {thing} to {his} friend {pal}.
| So {day} {he} opened the door and called, "{Pal}, would you like to see my {thing}?"
2 {Pal} did not laugh, and {they} did not want to take it away.
| "Oh," said {pal}, and for a moment that was all {they} could say.
2 "I have a secret too," said {pal}. "I always wanted to ask if I could come in."
| "It is lovely," said {pal}, "but it would be lovelier by the window."
3 So they carried it into the light and used it together to {use}.
| {Pal} stayed all afternoon, and they took turns with it.
3 {feast}
3 {night}
1 After that the {thing} stood where all could see it, and the house was full of guests.
| From then on the {hero} left the door open, and the {thing} made two people happy instead of one.
| That night the {hero} slept well, for a shared {thing} weighs nothing.
""",
    "the collector": """
1 {Where} lived a {hero} named {name} who wanted to own every {thing} in the world.
| {Name} the {hero} collected things, and {he} was proudest of a {adj} {thing}.
| Once upon a time there was a {hero} named {name} who had a hundred treasures, and the best was a {adj} {thing}.
| There was no room to sit in the house of {name} the {hero}, for there was a {thing} on every chair.
2 They stood on the shelves and on the stairs, and there was one in the bathtub.
| Every shelf was full, and {name} counted everything twice a day.
2 "Do not touch!" {he} told every visitor.
| Nobody was allowed to touch anything, and so nobody came.
3 At night {he} lay awake and wondered what else there was to get.
| {He} ate alone at a corner of the table, because there was no room for a second plate.
3 {weather}
1 {Day} a child stood at the fence and said, "I never had a {thing}."
| {Day} a child came to the door and asked, very softly, if {he} could spare a {thing}.
| {Day} a little neighbor looked through the window at the {thing}, and sighed.
3 "What would you do with it?" asked {name}. "I would {use}," said the child, "and think of you."
| "Why do you want it?" asked {name}. "To {use}," said the child. "What do you do with yours?"
3 {Name} opened {his} mouth, but {he} had no answer.
| Nobody had ever asked {name} that, and {he} did not know what to say.
2 {Name} wanted to say no, as {he} always did.
| {Name} looked at {his} full shelves, and all at once they looked empty.
1 The {hero} thought for a long time, and then, for the first time, {he} gave something away.
| "Take it," said the {hero}, and was surprised at how easy it was.
| Slowly the {hero} took it down, wiped off the dust, and put it into the child's arms.
2 The child skipped down the lane, and {name} felt something warm in {his} chest.
| The child's smile was brighter than everything on the shelves.
3 The next day two more children came, and then a {helper}, and nobody left with empty hands.
| So {he} gave away one more the next day, and another the day after.
3 Every gift left a bit of room, and into the room came light.
| Soon there was space for a second chair at the table, and then for a third.
3 {supper}
3 {night}
1 Now there is only one {thing} left in the house, but there is always a guest for tea.
| In the end {name} kept just one {thing}, and many, many friends.
| {Name} still collects, but now {he} collects thank-you notes, and the {thing} was only the start.
""",
}

# One hero, and a thing that the hero owns from the beginning.
OWNED = {
    "lost and found": """
1 {owns}
2 {useline}
1 But {day} {he} looked in its usual place, and the {thing} was gone.
| Then, {day}, the {thing} was not there.
| But {day} the {hero} woke up, and the {thing} was nowhere to be seen.
2 {He} looked under the bed, behind the stove, and even in the [flour|coal box|teapot], but in vain.
| {He} turned the whole house upside down and found two spoons and an old sock, but no {thing}.
3 "It cannot have walked away by itself," said {his} friend {pal}. "Where were you yesterday?"
| "Close your eyes and think," said {his} friend {pal}. "Where did you see it last?"
3 So {name} went back along every path of the day before.
| {Name} put on a warm coat and went out to search.
3 {weather}
3 "Have you seen a {adj} {thing}?" {he} asked a {helper}. "No," said the {helper}, "but I have seen you, by {place}."
| {He} asked a {helper}, who only said, "Lost things like to be looked for where you were happy."
3 {rest}
1 Then {he} remembered a nap by {place}, and there in the long grass it lay.
| At last {he} came to {place}, where {he} had rested the day before, and there it was.
| All at once {he} remembered [a picnic|a game] by {place}, and when {he} got there, it was waiting.
2 It was wet with dew, but nothing else was wrong.
| A [beetle|spider] had spent the night in it, and was asked very politely to leave.
3 "There you are," whispered {name}. "I should have taken better care of you."
| {Name} laughed out loud, and then {he} carried it home in both arms, like a baby.
3 {supper}
3 {night}
1 That night the {hero} put the {thing} back in its place and said good night to it twice.
| From then on the {hero} looked after the {thing} well, and it never spent another night alone.
| What the {hero} had lost was only a {thing}, but what {he} found again was a piece of home.
""",
    "broken and mended": """
1 {owns}
2 {useline}
1 {Day} {he} tripped on the stairs, and the {thing} was {broken}.
| But {day} it fell from the shelf, and the {thing} was {broken}.
| Then, {day}, {he} pulled too hard, and the poor {thing} was {broken}.
2 {Name} sat on the floor and did not know whether to cry or to shout.
| "Oh no," whispered {name}, and a tear ran down {his} nose.
3 First {he} tried to mend it with honey, but that only made it sticky.
| {He} tried to fix it alone, with string and hope, but it did not hold.
3 "Throw it away," said a {helper2}. "Never," said {name}.
| "You can always buy a new one," said a {helper2}. "But not this one," said {name}.
3 So {he} wrapped it in a cloth and set out for the next village.
| So {he} put it in a bag of straw and went to look for help.
3 {weather}
3 {rest}
1 A {helper} saw {him} and said, "Sit down, and I will show you how to mend it."
| {His} friend {pal} came with [a box of tools|thread and glue], and together they set to work.
| Luckily {his} friend {pal} had clever fingers and a great deal of patience.
2 They worked slowly, bit by bit, and nobody was in a hurry.
| It took the whole afternoon and two pots of tea.
2 When it was done, one could still see a thin line where the [damage|trouble] had been.
| When it was done it looked a little crooked, and a little proud.
3 "I can still see where it happened," said {name}. "Good," was the answer. "That is where you cared for it."
| {Name} looked at it from all sides. "It is better than before," {he} said, "because now I know how it is made."
3 {supper}
3 {night}
1 The {hero} loved the mended {thing} even more than before.
| Now the {hero} could {use} again, and every visitor heard the story of the {thing}.
| It was not a perfect {thing} anymore, but the {hero} had learned how to mend, and that was worth more.
""",
    "storm and shelter": """
1 {owns}
2 {useline}
1 {Day} {he} was far from home with it when a storm came up.
| {Day} the {hero} took the {thing} along on a trip, and then the sky turned black.
| {Day}, on the way to {his} {family}, {he} was caught in a storm.
2 Thunder rolled over the hills, and the rain came down like a curtain.
| The wind pulled at every tree, and the rain ran in rivers down the road.
3 "Do not be afraid," {he} told the {thing}, because it was easier than telling {him}self.
| {He} held on to the {thing} with all {his} might, so that the wind could not take it.
3 The path was gone, and the dark came early.
| There was no house and no light, only water above and water below.
1 By {place} {he} found a dry [corner|spot], and somebody was already there, cold and shaking.
| At last {he} saw a little shed by {place}, and inside sat a {helper}, wet to the skin.
| By {place} stood an old hut, and in it a lost child was waiting for the rain to stop.
3 "Is there room for one more?" asked {name}. "There is always room for one more," was the answer.
| "May I come in?" asked {name}. "Please do," was the answer. "Two are warmer than one."
2 {Name} sat down close by, and then {he} showed the {thing} around and told its whole story.
| To pass the time, {name} told a long story about the {thing}, and made up the second half.
3 They told each other jokes, and the thunder did not sound so big anymore.
| They sang every song they knew, and the storm kept the beat.
3 There was some bread in {his} bag, and they cut it fairly in two.
| They had only a little cheese, but they shared it to the last crumb.
3 Hour after hour the rain drummed on the roof.
| Somewhere a tree fell with a crash, and they moved a little closer together.
2 After a while the thunder grumbled and went away over the hills.
| Little by little the rain grew soft, and then it stopped.
1 When the sun came out, the {hero} had a dry {thing} and a new friend.
| By morning the storm was over, and the {hero} went home with the {thing} and with a new friend to visit.
3 Every leaf had a drop on it, and every drop had a small sun in it.
| A rainbow stood over the wet fields, with one foot in the river.
2 They still meet whenever it rains.
| Since then {name} has never minded a storm.
| And whenever thunder rolls, {name} smiles a little.
""",
    "fear of the dark": """
1 {Name} the {hero} was afraid of the dark, and so {he} slept beside {his} {adj} {thing}.
| There was once a {hero} named {name} who had a {adj} {thing} and a great fear of the dark.
| A {adj} {thing} stood by the bed of a {trait} {hero} named {name}, who did not like the dark at all.
| {Where} lived a {hero} named {name} who told {his} {adj} {thing} good night, because {he} feared the dark.
2 By day {he} was as brave as a lion, and {he} used it to {use}.
| In the daytime {he} laughed about it, and in the night {he} did not.
1 One night {he} heard a noise outside: tap, tap, tap.
| One night, when the moon was hidden, something went scratch, scratch, scratch at the door.
| One night there was a long, low sound in the yard: hoo, hoo, hoo.
2 {Name} pulled the blanket up to {his} nose and listened.
| {His} heart beat so loud that {he} could count it.
3 "Perhaps it is a monster," {he} thought, "and perhaps it has not had its supper."
| "It is nothing," {he} told {him}self, but nothing had never sounded like that before.
3 {He} counted to ten, and then, to be safe, to twenty.
| {He} waited for it to stop, but it did not stop.
3 The clock in the hall struck twelve, very slowly.
| The house was dark from the cellar to the roof.
1 {He} held the {thing} tight, counted to three, and opened the door.
| "We will look together," {he} told the {thing}, and on soft feet they went to see.
3 The stairs creaked, and the cold came in under the door.
| Step by step {he} went down the hall, and with each step {he} felt a bit braver.
1 It was only a branch in the wind, and the {hero} had to laugh.
| It was only a small, lost kitten that wanted to come in.
| It was nothing but the old gate, swinging in the wind.
3 "So that was you," said {name}. "You gave me a fine fright."
| "Good evening," said {name}, who was always polite. "You might have told me who you were."
2 Then {he} looked up, and there were more stars than {he} had ever seen.
| Above the roofs the sky was full of stars, and {he} had never known it.
3 The night smelled of grass, and somewhere a cricket was playing its one song.
| The garden was silver, and nothing in it was unkind.
3 "All this was here every night," {he} thought, "and I was under a blanket."
| {He} stood there for a long time and forgot to be afraid.
3 In the morning {he} told {his} friend {pal}. "Were you not afraid?" {they} asked. "Yes," said {name}, "and I went."
| At breakfast {he} told {his} friend {pal} everything, and {they} wanted to come along the next time.
1 Now the {hero} and the {thing} sit outside on warm nights, and the dark keeps them company.
| After that the {hero} still kept the {thing} near the bed, but more for friendship than for fear.
| The {hero} went back to bed, put the {thing} by the pillow, and slept until noon.
""",
    "a trade": """
1 {owns}
1 {Day} a peddler came by and offered [a golden bird|a silver chain|a red horse of wood] for it.
| {Day} {his} friend {pal} said, "I will give you my [silver spurs|music box|glass bird] for that {thing}."
| {Day} at the market, a merchant offered {him} [a golden cage|a silver dish|a glass star] for the {thing}.
2 It shone so brightly that {name} forgot everything else.
| "Look how it shines," {he} thought, and {his} head began to spin.
1 They shook on it, and the {hero} went home with {his} new treasure.
| The {hero} said yes before {he} had time to think.
2 But it only stood there and shone, and {he} could not {use} with it.
| But all one could do with it was look at it, and how long can one look?
3 {He} put it on the table, and then on the shelf, and then on the table again.
| On the first day {he} polished it, and on the second day {he} was tired of polishing.
3 "It must be worth a great deal," said a {helper2}. "It must be," said {name}, and sighed.
| "How fine!" said the neighbors, and {name} tried hard to be glad.
3 At night {he} lay awake and thought of the {thing}.
| Again and again {he} looked at the empty place on the wall.
3 In the morning {he} made up {his} mind and set out.
| When the week was over, {he} packed up the treasure and went down the road.
3 {weather}
3 {rest}
1 Before long {he} missed the {thing} so much that {he} went back to trade again.
| After three days {he} knew that {he} had made a mistake, and {he} went to ask for the {thing}.
2 "I want my old friend back," {he} said, and was a little ashamed.
| "I am sorry," said {name}. "I did not know what I had."
3 "I thought that you would come," was the answer. "I kept it safe for you."
| "Good," was the answer. "I could not get used to it anyway. It missed you."
3 {supper}
3 {night}
1 The {hero} never traded it again, not even for the moon.
| Since then the {hero} knows that gold may shine, but an old {thing} is warm.
| And when people praise gold and silver, the {hero} just smiles and goes home to {use}.
""",
    "a promise": """
1 "Keep it safe until I come back," said {pal}, and gave a {adj} {thing} to {name} the {hero}.
| Before {they} went to sea, {pal} gave a {adj} {thing} to a {trait} {hero} named {name} to look after.
| A {trait} {hero} named {name} once promised to look after a {adj} {thing} for {his} friend {pal}.
| The {adj} {thing} belonged to {pal}, but {they} had to go away, so {name} the {hero} promised to keep it.
2 "I promise," said {name}, and {he} meant it.
| "You can count on me," said {name}, and they shook on it.
2 Every week {he} dusted it, and every Sunday {he} put it in the sun for a while.
| {He} wrapped it in a soft cloth and looked at it every evening.
3 The leaves fell, and the snow fell, and the swallows came back, but {pal} did not.
| A year went by, and then another, and no letter came.
3 "Nobody is coming for it," said a {helper}. "A promise has no last day," said {name}.
| "You could use it yourself to {use}," said a {helper}. "It is not mine," said {name}.
1 A rich merchant wanted to buy the {thing}, but {name} shook {his} head.
| One night there was a fire in the lane, and {name} saved the {thing} before anything else.
| Many people wanted the {thing}, and some offered gold, but the {hero} always said no.
3 There were hard days too, when there was little on the table.
| It was a cold winter, and more than once {he} was tempted to give up.
3 Yet each evening {he} put a candle in the window, so that {pal} could find the way.
| Now and then {he} went to {place} and looked down the long road.
3 {weather}
1 After [three|five|seven] years there was a knock at the door, and there stood {pal}.
| Then, {day}, {pal} came up the lane with gray hair and a big smile.
2 "Do you still have it?" {they} asked. "Of course," said {name}. "I promised."
| {Name} said nothing, but put it into the arms of {his} friend, clean and whole.
3 {Pal} was quiet for a moment. "I thought of this every day," {they} said, "and of you."
| {Pal} looked at it and began to cry a little, the good way.
3 {feast}
3 {night}
1 {Pal} looked at the {thing}, then at the {hero}, and said, "Now let us share it."
| "Everything else has changed," said {pal}, "but not my {thing}, and not my good {hero}."
| The {thing} went home that day, but the {hero} kept the best part, which was the friendship.
""",
    "a quarrel": """
1 {owns}
2 {useline}
1 {Day} {his} cousin {pal} said, "That {thing} is mine!"
| {Day} {his} friend {pal} borrowed the {thing} without asking, and they began to quarrel.
| {Day} {his} cousin {pal} came to stay, and both of them wanted the {thing} at the same time.
2 They pulled on it from both sides and shouted until their faces were red.
| One said yes and the other said no, louder and louder, until the birds left the trees.
2 Then each of them went home and slammed the door.
| For a whole week they did not say a word to each other.
3 {Name} had the {thing} to {him}self now, but somehow it was no fun to {use} alone.
| {Name} sat in the kitchen, and the kitchen was very quiet.
3 "How is {pal}?" asked a {helper2} at the market. "I do not know," said {name}, and felt bad about it.
| "You two were always laughing," said a {helper2}. "What happened?"
3 It rained for three days, as if the sky had joined the quarrel.
| Across the way, {pal} sat at the window too, and pretended to read.
3 {He} baked something, and there was far too much of it for one.
| {He} thought of a joke, and there was nobody to tell it to.
3 "It was a silly thing to fight about," {he} said to the wall, and the wall did not disagree.
| "Somebody has to be the first," {he} thought, "and I have good shoes."
1 At last the {hero} took the {thing} and knocked at the door. "You first," {he} said.
| Then the {hero} came with the {thing} and {food}, and said that {he} was sorry.
| In the end the {hero} said, "A {thing} is only a {thing}, but you are my friend."
2 "No, you first," said {pal}, and both of them had to laugh.
| "I am sorry too," said {pal}, and {their} ears turned pink.
3 So they made a plan: one had it on even days, and the other on odd days.
| They agreed to keep it in the middle of the lane, under a little roof.
3 {feast}
3 {night}
1 From then on they took turns, and on Sundays they used it together.
| It never became clear who had been right, and nobody asked.
| They have quarreled since, of course, but never again about that.
""",
    "a contest": """
1 {owns}
1 {Day} there was a great contest: the finest {thing} in the land would win a prize.
| {Day} the mayor said, "There will be a prize for the most wonderful {thing} of all."
| Then a prize was promised for the best {thing} in the whole valley.
2 {Name} polished it for three days, until {his} arms were tired.
| {Name} did not hope to win, but {he} wanted to see the others.
3 {weather}
3 {rest}
2 The others had brought splendid ones, with gold and silver and little bells.
| There was one as big as a door, and one as small as a pea, and all were finer than the one {he} had.
3 {Name} wanted to hide behind a tree. "Stay," said a {helper}. "Somebody has to be last, and it may not be you."
| "Is that all?" laughed a boy in the crowd. "Yes," said {name}, "and it is enough for me."
3 The judge walked up and down with a long nose and a short pencil.
| A band was playing, and everywhere it smelled of {food}.
1 The judge looked at them all and asked only one question: "Who made somebody happy with it?"
| "Now show me," said the judge, "what each of them has done for others."
| "I do not care for gold," said the judge. "Which of them has been used with love?"
2 Nobody spoke, for the others had always been kept behind glass.
| One after the other looked down, for the fine ones had never left the cupboard.
3 Then a small voice called, "That one helped my mother last year!" It was a child from {his} street.
| Then a neighbor stood up. "When we needed it," the neighbor said, "the door was always open."
3 {Name} turned red and did not know where to look.
| Everyone turned around, and there stood {name}, holding it tight.
1 Then the {hero} told how {he} lent it to all the neighbors, and everyone clapped.
| Only the {hero} could say how often a friend had come to borrow the {thing}, and so {he} won.
| Shyly the {hero} said that half the village used it to {use}, and the whole crowd cheered.
3 The prize was a great big supper of {food}, and nobody went home hungry.
| The prize was a blue ribbon, and it was tied on with a bow.
3 {night}
2 {Name} went home with the prize, and the {thing} was lent out again the next day.
| That evening {he} shared the prize with the whole street, and put the {thing} back to work.
| A prize is nice, thought {name}, but a {thing} in good use is nicer.
""",
    "a long road home": """
1 {Name} the {hero} was far from home, and all {he} had was a {adj} {thing}.
| With a {adj} {thing} on {his} back, a {trait} {hero} named {name} set out on the long road home.
| A {hero} named {name} had been away for a year, and now {he} was going home with a {adj} {thing}.
| Long ago a {trait} {hero} named {name} had to cross the whole country, and {he} took only a {adj} {thing}.
2 It had belonged to {his} {family}, who always said that a good {thing} knows the way.
| It was for {his} {family}, who needed it to {use}.
2 On the first day {he} sang, on the second {he} hummed, and on the third {he} only went on.
| The road went up and down, and the milestones went by very slowly.
3 {weather}
3 {rest}
3 {chat}
1 In the hills {he} lost the way, and the {hero} sat down and nearly wept.
| At the crossroads there was no sign, and the {hero} did not know which way to go.
| When the fog came, {he} could not see the road anymore.
3 "We have come so far," {he} told the {thing}, "and we are not going to stop now."
| "Left or right?" {he} asked the {thing}, for there was nobody else to ask.
2 "You look lost," said a {helper}. "A little," said {name}. "Only my feet are sure."
| Just then a {helper} came by with a cart full of hay.
1 {He} lent the {thing} to a {helper} for the evening, and in return {he} was shown the way.
| Some travelers saw the {adj} {thing}. "I know where such things come from," said one, and showed {him} the road.
| By luck a {helper} knew the {thing} at once and told {him} which road to take.
3 {He} slept in a barn, and the hay smelled of summer.
| That night {he} slept under a hedge and dreamed of {food}.
3 In the morning the hills looked smaller, and {his} steps grew longer.
| The next day {he} went over the last hill, and the wind smelled of home.
3 There was {place}, just as it had always been, and there was the little blue gate.
| The dog at the corner barked once, and then it knew {him}.
1 On the seventh evening {he} saw a light in a window, and it was {his} own house.
| At sunset the {hero} saw smoke from {his} own chimney, and {he} began to hurry.
| Then the road made one last turn, and there was home.
3 {supper}
2 "How was the road?" they asked. "Long," said {name}, "but it was going the right way."
| The whole family came out to meet {him}, and everybody talked at once.
2 The {thing} got the best place by the fire, and so did the {hero}.
| {He} put the {thing} on the table and said the best word there is: "Home."
| And the {thing}, which had seen the whole world, was put on the shelf to rest.
""",
    "lent to a friend": """
1 {owns}
2 {useline}
1 {Day} {his} friend {pal} asked to borrow the {thing}, and {name} said yes.
| {Day} {pal}, who lived down the road, asked, "May I borrow your {thing} until Friday?"
| {Day} {name} lent the {thing} to {his} friend {pal}, who promised to bring it back soon.
2 Friday came and went, and so did the next one.
| A week went by, and then two, and nothing happened.
3 "You will never see it again," said a {helper2}. "I think I will," said {name}, but {he} was not so sure.
| "I would have said no," said a {helper2}. "That is why nobody asks you," said {name}.
3 {He} tried to {use} without it, and it was not the same.
| Every evening {he} looked down the road, and every evening the road was empty.
2 {Name} grew angry, and {he} made up a long speech with many hard words.
| {Name} began to have [dark|bad] thoughts, and they did not taste good.
3 {He} practiced the speech in front of the mirror, and it got longer each time.
| At night {he} imagined all the things that might have been done to it.
3 In the end {he} put on {his} hat and went to get it.
| On Saturday {he} had waited long enough, and {he} marched down the road.
3 {weather}
1 When the {hero} went to ask for it, {he} found {pal} sick in bed.
| Then the {hero} heard that {pal} had broken a leg and could not leave the house.
| But {pal} had been in bed with a fever all that time, and nobody had known.
3 The curtains were closed, and the stove was cold.
| The [soup|tea] on the table had been cold for days.
2 Beside the bed stood the {thing}, clean and safe, with a thank-you note.
| "I wanted to bring it back," said {pal} in a small voice, "but I could not get up."
3 {Name} forgot every word of the speech and was glad that {he} had not made it.
| "Forget about that," said {name}. "Have you had anything to eat?"
1 So {name} made a fire, cooked soup, and stayed until {pal} was well.
| {Name} said nothing of the {thing}, but came back every day with {food}.
3 Day by day there was more color in the cheeks of {his} friend, and more laughter in the room.
| They played cards on the blanket, and the sick one won every time.
3 {night}
2 Later they carried the {thing} home together, and the {hero} took the long way on purpose.
| After that the {hero} lent the {thing} gladly, and never counted the days again.
| "Keep the {thing} a little longer," said the {hero}. "I come here more often that way."
""",
}

# Two characters. If they share a pronoun, the friend's noun replaces {they} and {them}.
FRIENDS = {
    "a stranger in the rain": """
1 A {trait} {hero} named {name} sat by the fire one rainy night when a {friend} knocked at the door.
| One stormy evening {name} the {hero} opened the door, and there stood a {friend}, wet from top to toe.
| It was raining hard when a {hero} named {name} heard a knock, and outside stood a {friend}.
| Once upon a time, on the wettest night of the year, a {friend} came to the house of {name} the {hero}.
2 "My name is {pal}," said the {friend}, "and I have lost my way."
| "I am {pal}," said the {friend} with a shiver. "May I wait here until the rain stops?"
2 Now, {name} did not know any strangers, and {he} was a little afraid.
| {Name} had heard many bad stories about strangers, and not one good one.
3 The wind shook the shutters, and the rain ran down the glass.
| Behind the stranger the night was as black as a hat.
1 "Come in and get warm," said the {hero}, and put on some soup.
| The {hero} opened the door wide and pulled a second chair up to the fire.
3 For a while they only listened to the rain and did not know what to say.
| At first they both looked at the floor.
3 "Is it a long way to your house?" asked {name}. "It was long," said {pal}, "until I saw your light."
| "Do you like soup?" asked {name}. "I like anything that is warm," said {pal}.
3 {feast}
2 {Pal} told stories of far places, of ships and deserts and cities on hills.
| {Pal} knew a song for every month of the year, and they sang them all.
3 {Name} had never been farther than {place}, and {he} listened with shining eyes.
| {Name} laughed until {he} had to hold on to the table.
3 The fire burned low, and nobody had noticed that the rain had stopped.
| When the clock struck midnight, both were surprised.
3 {Name} made a bed of blankets, and soon the house was still.
| "Stay until morning," said {name}, and gave {them} the softest pillow.
1 In the morning the sun was out, but neither of them wanted to say goodbye.
| By morning the rain had stopped, and the {friend} had left a shining star of straw on the table.
| When the day came, the stranger was gone, but the wood was cut and the table was set.
3 {weather}
2 "I used to be afraid of a knock at the door," said {name}. "Now I shall listen for it."
| "Who comes as a stranger," said {name}, "may leave as a friend."
1 And every year, on the first rainy night, the {friend} came back to the {hero} for soup.
| From that night on the {hero} left a lamp in the window, and the {friend} always found it.
| Since then, when it rains, the {hero} sets two bowls on the table, one of them for the {friend}.
""",
    "the lesson": """
1 A {trait} {hero} named {name} wanted to learn to whistle, so {he} went to {pal} the {friend}.
| There was once a {trait} {hero} named {name} who could not dance a single step, and so {he} asked a {friend} for help.
| "Teach me to sing," said {name} the {hero} to a {trait} {friend} named {pal}.
| Everyone could sing but {name} the {hero}, until {he} met a {friend} named {pal}.
2 "It is not hard," said {pal}. "It only takes a long time."
| "I can teach you," said {pal}, "if you are not afraid to be bad at it first."
1 The first try was so bad that the {friend} had to cover {their} ears and laugh.
| On the first day it went wrong, and on the second day it went wrong in a new way.
| At first it was terrible, and the birds flew out of the trees.
2 "Again," said the {friend}, kindly, and "again," and "again."
| "Very good," said the {friend}. "Now you know how not to do it."
3 {Name} wanted to give up and go home. "Come back tomorrow," said {pal}, "and bring some {food}."
| "I am too old for this," said {name}. "You are too young to say so," said {pal}.
3 {weather}
3 They met every afternoon by {place}, where nobody could hear them.
| Each day after lunch they practiced by {place}.
3 {chat}
3 Sometimes they just sat there and were silent, and that was a lesson too.
| On some days it went worse than before, but on those days they laughed more.
1 But {he} practiced every day, and the {friend} never lost patience.
| Still the {friend} and the {hero} went on, week after week, and little by little it grew better.
3 Spring became summer, and nobody covered an ear anymore.
| One evening a bird answered, and they both held their breath.
3 {He} did it on the way to the well, and in bed, and even in {his} dreams.
| The neighbors, who had closed their windows, opened them again.
1 At the summer party {name} did it in front of everyone, and it was beautiful.
| Then, {day}, it worked, and nobody was more surprised than {name}.
2 "How did you teach me?" asked {name}. "I only waited," said {pal}.
| "I have nothing more to teach you," said {pal}, and {they} looked almost sad.
3 {feast}
3 {night}
2 "Now," said the {friend}, "it is your turn to teach," and the {hero} thought about that all the way home.
| The {hero} thanked the {friend}, and the next day {he} began to teach somebody else.
| But the {hero} came back to the {friend} the next day anyway, for by then it was not about the lesson.
""",
    "the rivals": """
1 {Name} the {hero} and {pal} the {friend} both thought they baked the best pie in the valley.
| There were two good cooks in the valley, a {hero} named {name} and a {friend} named {pal}, and they did not get along.
| "My pie is the best," said a {hero} named {name}. "No, mine is," said a {friend} named {pal}.
| Nobody baked like {name} the {hero}, except perhaps {pal} the {friend}.
2 If one used two eggs, the other used four.
| Each of them looked over the fence to see what the other was doing.
2 They never said good morning, and they never said good night.
| People had to eat two pieces of everything, just to be polite.
3 "Yours needs salt," said one. "Yours needs everything," said the other.
| "I smell something burning," called {name}. "That is only your envy," called {pal}.
3 {weather}
1 On the day of the fair, {name} had no flour left, and {pal} had no apples.
| Then, on the morning of the great fair, the {hero} ran out of flour and the {friend} ran out of fruit.
| But {day}, just before the fair, the rain got in and spoiled half of what each of them had.
3 {Name} sat down on the steps with {his} head low.
| {Name} looked into one cupboard after another, and all were bare.
3 Through the fence {he} heard a sigh, and it sounded just like {his} own.
| Then {he} heard somebody crying next door, and {he} knew the voice.
2 For a long time they looked at each other over the fence.
| It was {name} who spoke first, and it was not easy.
1 "I have what you need," said the {hero}, "and you have what I need. Let us bake one pie."
| So the {hero} and the {friend} put together what they had and baked one pie.
3 They mixed and rolled and argued a little, from habit.
| "More butter," said {pal}. "I was about to say that," said {name}, and for once they agreed.
3 Flour flew about like snow, and soon both of them were white.
| While it was in the oven, they sat side by side and waited.
3 "Why did we never do this before?" asked {name}. "You never asked," said {pal}. "Neither did you," said {name}.
| "I always liked your crust," said {pal}. "And I liked your filling," said {name}.
1 It was the finest pie that anyone had ever tasted.
| The judges ate it all, and then they asked for more.
3 They won the golden spoon, and it hung one week here and one week there.
| The whole fair stood in line for a slice.
2 Nobody could say whose work it was, and nobody asked.
| When they heard the cheers, they looked at each other and smiled.
2 Soon there was a gate in the fence, and the {hero} and the {friend} wore it out with use.
| After that there was only one kitchen, with room in it for a {hero} and a {friend}.
| They still say that they are rivals, the {hero} and the {friend}, but they say it with their mouths full.
""",
    "the guide": """
1 A {trait} {hero} named {name} was lost in the deep wood when a {friend} came down the path.
| {Day} a {hero} named {name} lost the way in the fog and met a {friend}.
| Far from home, where two paths crossed, a {trait} {hero} named {name} met a {friend}.
| Once upon a time a {trait} {hero} named {name} got lost, and the first to come by was a {friend}.
2 "You look lost," said the {friend}, whose name was {pal}.
| "Good day," said the {friend}. "I am {pal}. Is this a walk, or are you lost?"
2 "I am not lost," said {name}. "I just do not know where I am."
| "I am looking for the road home," said {name}, "but it is not looking for me."
3 All around, the trees stood close together like a crowd.
| The light was going, and every path looked the same.
1 "I do not know the way either," said the {friend}, "but two can look better than one."
| "Follow me," said the {friend}. "I know this place like my own kitchen."
| "Come along," said the {friend}. "It is a long way, but I have time."
3 So they went on side by side, and the wood did not seem so dark.
| {Name} was not sure about that, but it was better than sitting still.
3 {Pal} pointed out small things on the way: a nest, a spring, a ring of mushrooms.
| They shared some bread and cheese, and after that they were no longer strangers.
3 "Are you never afraid out here?" asked {name}. "Often," said {pal}, "but then I hum."
| "Do you live alone?" asked {name}. "Not when I have company," said {pal}.
3 Once they had to cross a stream, and once they had to go around a sleeping bull.
| Once they went in a circle, and they laughed when they met their own tracks.
2 They talked about everything, and the miles went by like minutes.
| On the way they made up a song with one verse for every mile.
3 {weather}
1 Then the trees grew thin, and there below them lay the village.
| At sunset they came over a hill, and {name} saw {his} own roof.
3 The windows were lit, and the smell of supper came up the hill.
| A dog barked somewhere below, and smoke stood over the chimneys.
2 "How can I thank you?" asked {name}. "Get lost again some day," said {pal} with a smile.
| "Come in and eat with us," said {name}, and {pal} did not have to be asked twice.
3 {feast}
3 {night}
1 After that the {hero} often took the path into the wood, and the {friend} was always there.
| Sometimes the {hero} still gets lost on purpose, and the {friend} always finds {him}.
| The {hero} drew a map that night, and in the middle of it {he} drew the {friend}.
""",
    "the quarrel": """
1 {meets}
2 They did everything together, and they told each other everything.
| They were such good friends that they had only one clock, and it hung on the fence.
1 But {day} they quarreled about a silly joke, and the {friend} went home without a word.
| But {day} they had a quarrel, and by evening nobody knew what it had been about.
| Then, {day}, {name} said something unkind, and the {friend} stopped coming by.
2 {Name} closed the curtains on that side of the house.
| "I do not need anyone," said {name} to the empty kitchen.
3 The days were long, and the tea got cold in the cup.
| {He} tried to play both sides of a game, but {he} always knew what {he} would do.
3 "Where is your friend?" asked a {helper}. "What friend?" said {name}, and looked away.
| A {helper} asked after {pal}, and {name} pretended not to hear.
3 {weather}
3 It was the kind of day to share, and there was nobody to share it with.
| Such a day would have been perfect for a walk for two.
2 In the night {name} heard {pal} coughing through the wall, and the {hero} could not sleep.
| Then the first snow fell, and the {hero} saw that there was no smoke from the chimney of the {friend}.
| One evening the {hero} looked out and saw the {friend} sitting on the steps, all alone.
3 {He} turned to one side, and then to the other, and then {he} got up.
| "I was wrong," {he} thought, "and being wrong is cold work."
2 {Name} made a big pot of soup and went out into the cold.
| {He} took {food} and a lantern and crossed the yard.
3 At the door {he} stopped, for the word was heavy, and it was only a small word.
| {He} stood outside for a long time before {he} dared to knock.
1 "I am sorry," said {name}, and {pal} said it at the very same time.
| "I came to say that I am sorry," said {name}. "I was just on my way to you," said {pal}.
2 Then both of them laughed, and the snow on the roof slid down from the noise.
| They did not talk about it any longer, because there was so much else to tell.
3 {feast}
3 {night}
1 The next morning the {hero} and the {friend} took a board out of the fence, and it was never put back.
| Since then, when they quarrel, the {hero} and the {friend} never let the sun go down on it.
| And if one of them says something silly, the {hero} or the {friend}, they both have soup.
""",
    "the shy neighbor": """
1 {meets}
1 The {friend} was so shy that {they} never came out when the {hero} was near.
| They had never spoken, for the {hero} was shy, and the {friend} was even shyer.
2 {Name} often saw a curtain move, but nobody waved.
| When {name} said good morning, a door closed softly.
3 "That one does not like anybody," said the people. "How do you know?" asked {name}.
| "Leave {pal} alone," said a {helper}. "Alone is just the trouble," said {name}.
3 {weather}
2 {Name} wondered what one could do, for one cannot shake hands through a wall.
| "Perhaps," thought {name}, "words are too loud."
1 {Day} {name} put some {food} on the doorstep, knocked, and went away.
| So {day} {name} left a little note on the doorstep: "Your roses are beautiful."
2 The next morning there was a jar of jam on {his} own doorstep.
| The next day {he} found a small bunch of flowers at {his} own door.
3 There was no name on it, but {name} knew at once.
| {Name} looked up, and behind the curtain something moved.
3 So it went on all summer: a cake for a cup of seeds, a drawing for a song on the flute.
| After that something lay there every morning, now on one step and now on the other.
3 They never spoke a word, and yet they knew each other better and better.
| {Name} learned that {pal} liked [yellow|blue] things and could draw very well.
3 Then, one week in autumn, nothing came. So {name} went over, and this time {he} did not run away after the knock.
| But one cold morning there was nothing on the step, so {name} crossed the grass and knocked softly, three times.
1 After a while the door opened a little, and a soft voice said, "Would you like to come in?"
| Then, one evening, the {friend} stood in the door and said, very fast, "I have made tea."
2 "I have wanted to say that for a year," said {pal}, and {they} turned as red as a beet.
| "I practiced that all morning," said {pal}. "It was very good," said {name}.
3 {feast}
3 {night}
2 They did not talk much, the {hero} and the {friend}, but they were quiet together, and that is better.
| Now the {friend} talks so much that the {hero} can hardly get a word in, and both of them like it.
| Some doors open slowly, thought the {hero}, and {he} took the good cup that the {friend} held out.
""",
    "the surprise": """
1 {meets}
1 {Day} {name} noticed that {pal} was sad, because nobody had remembered {their} birthday.
| In a week the {friend} would have a birthday, and the {hero} wanted it to be the best of all.
| "Nobody knows when my birthday is," said the {friend}, and the {hero} began to make a plan.
2 {Name} told everyone in the village, and everyone promised to keep it secret.
| {He} went from house to house and whispered something at every door.
2 But it is hard to bake a cake for a whole village in secret.
| {Name} was bad at secrets, and {he} had to hold {his} mouth shut twice.
3 "What smells so good?" asked {pal} at the window. "Nothing," said {name}. "That is my soap."
| "Why is there flour on your nose?" asked {pal}. "It must be snow," said {name}, though it was June.
3 {Pal} began to think that everyone was hiding something.
| When {pal} came to the market, all the talking stopped.
3 Poor {pal} went home early and closed the shutters.
| "Even {name} has no time for me," thought {pal}, and that hurt.
3 {weather}
1 On the evening of the birthday {name} knocked and said, "Come quickly, I need your help."
| When the day came, {he} asked {them} to come along to {place}, and would not say why.
3 They went down the lane without a word, one of them sad and the other almost bursting.
| {Pal} put on a coat and followed slowly.
2 It was dark there, and somebody giggled behind a bush.
| All was still, and then somebody sneezed behind a wall.
1 Then a hundred lights went on, and everyone shouted, "Happy birthday!"
| All at once there were lamps in every tree, and the whole village began to sing.
3 There was {food}, and a band with two trumpets, and a cake as high as a chair.
| There were paper stars in the branches and a long table under them.
2 {Pal} laughed and cried at once, and could not find a word.
| "For me?" asked {pal}. "For nobody else," said {name}.
3 They danced until the candles were small, and even the mayor lost a shoe.
| There were games and songs, and the cake was gone before it could be cut.
3 {night}
2 It was the best birthday the {friend} ever had, and the {hero} slept for two days after it.
| "I thought you had all forgotten me," said the {friend}. "You are hard to forget," said the {hero}.
| And the next year, on {his} own birthday, the {hero} heard the {friend} giggle behind a bush.
""",
    "the goodbye": """
1 {meets}
2 Every evening they sat on the same bench and watched the sun go down.
| They had shared every winter and every summer for as long as they could think.
1 {Day} the {friend} said, "I must go away for a while," and the {hero} did not know what to say.
| But {day} a letter came, and the {friend} had to leave for a far country.
2 "How long is a while?" asked {name}. "As long as it takes," said {pal}, "and not one day more."
| "Will you forget me?" asked {name}. "I could sooner forget my own nose," said {pal}.
3 {Name} helped to pack, and {he} put some honey in the bag when nobody was looking.
| They packed the bag three times, because neither of them wanted it to be done.
3 They walked together as far as {place}. There they waved until their arms hurt.
| At {place} they said goodbye, and then once more, to be sure.
3 The house next door stood dark, and the bench was too long for one.
| That evening the sun went down as always, but it did not look the same.
1 So they planted a tree, and {name} promised to water it until {pal} came home.
| {Name} was sad, but {he} wrote a letter every week and told {them} all the news.
| Before leaving, {pal} gave {him} half a ribbon and kept the other half.
3 {weather}
3 "Any news?" asked a {helper2}. "Not yet," said {name}, "but today is not over."
| "You should find a new friend," said a {helper2}. "I have one," said {name}. "The road just got longer."
3 The seasons went around once, and then they went around again.
| The winter was long, and the spring took its time.
2 Now and then a postcard came, with strange stamps and a small drawing.
| Some days were easy and some were not, and all of them went by.
1 One evening, when the sky was red, there were steps on the path, and they were steps {he} knew.
| Two years later, as {name} sat on the bench, somebody sat down beside {him}.
| Then, {day}, the house next door had smoke in its chimney again.
3 {Name} did not turn around at once, for {he} wanted to be sure that it was true.
| For a moment {he} could not speak, and {he} did not have to.
2 "Is this place taken?" asked {pal}. "It was kept," said {name}.
| "You are late for tea," said {name}. "I know," said {pal}. "Is it still warm?"
3 {feast}
3 {night}
2 The {hero} and the {friend} watched the sun go down, and nobody said a word, because everything was said.
| And the {hero} told the {friend} all that had happened, which took two years and one night.
| Far is only a word, thought the {hero}, when a {friend} comes home.
""",
}

# Two things, and a child who meets both.
PAIRS = {
    "only one of them": """
1 On the table stood a {adj} {thing} and a {adj2} {other}, and a {hero} named {name} could choose only one.
| "You may take the {thing} or the {other}," said the {helper} to a {hero} named {name}, "but not both."
| {Name}'s {family} held out a {adj} {thing} and a {adj2} {other} and said, "One of them is for you."
| Once upon a time a {trait} {hero} named {name} had to choose between a {thing} and a {other}.
2 With the {thing} {he} could {use}, but with the {other} {he} could {use_other}.
| The {thing} was good if one wanted to {use}, and the {other} was good if one wanted to {use_other}.
1 {Name} looked from one to the other and could not make up {his} mind.
| "How can anyone choose?" sighed {name}, and {he} walked around them three times.
2 {He} counted it out with a rhyme, and then {he} counted it out again with a longer rhyme.
| {He} picked up the one, and missed the other, and put it down again.
3 "Take the bigger one," said a boy. "Take the brighter one," said a girl.
| "Close your eyes and point," said a {helper2}. {Name} tried it and pointed at the cat.
3 {weather}
3 The clock struck ten, and it struck eleven, and still {name} stood there.
| Noon came, and {he} had eaten nothing, so hard was {he} thinking.
3 "What would you do," {he} asked, "if you were me?" "I would ask who else needs something," was the answer.
| "Is there a wrong one?" {he} asked. "No," was the answer, "but there is a kind one."
3 Then {he} went outside for some air, and {he} saw someone on the steps.
| Through the window came a sniff, and then another.
2 By the door stood somebody small, who had nothing at all.
| Then {he} thought of somebody else, who had not been asked.
1 At last {he} took the {thing} for {him}self and asked if {his} friend {pal} could have the {other}.
| In the end {he} chose the {other}, because {his} friend {pal} needed a {thing} far more.
| Then {he} chose the {thing}, but not for {him}self: {he} gave it to {pal}, who could {use} with it.
3 {Pal} jumped so high that both {their} shoes came off.
| "Really?" asked {pal}. "Really," said {name}, and it felt very good.
2 That was the one answer that nobody had thought of.
| It was easy, once {he} stopped thinking about {him}self.
3 {feast}
3 {night}
1 "That was the right choice," said a voice behind {him}, and that is how {name} got the other one too.
| And because {he} had chosen so kindly, in the end there was enough for everybody.
| It is a strange kind of counting, but when {name} shared, {he} had more than before.
""",
    "each needs the other": """
1 {Where} lived a {hero} named {name} who had a {adj} {thing}, and next door lived {pal}, who had a {adj2} {other}.
| {Name} the {hero} was proud of {his} {adj} {thing}, and {his} neighbor {pal} was proud of {their} {adj2} {other}.
| "My {thing} is better than your {other}," said a {hero} named {name} to {pal}, the child next door.
| The {adj} {thing} belonged to a {hero} named {name}, and the {adj2} {other} belonged to {pal} across the street.
2 With the {thing} one could {use}, and with the {other} one could {use_other}.
| One was there to {use}, and the other was there to {use_other}, so how could they be compared?
2 "Mine is finer," said {name} every morning. "Mine is more useful," said {pal} every evening.
| They argued about it at breakfast, at lunch, and over the fence at night.
3 {weather}
3 The grown-ups put wool in their ears.
| Even the [dog|cat] went to live at the end of the lane for a while.
3 "Why not ask a judge?" said a {helper}. But the judge only said, "I have a cold," and closed the window.
| A {helper} listened for an hour. "I see," said the {helper}, "that both of you are right, and both are silly."
1 {Day} {name} needed a {other}, and it so happened that {pal} needed a {thing}.
| Then, {day}, {pal} wanted to {use} and could not, and {name} wanted to {use_other} and could not either.
3 {Name} tried everything else first, even a broomstick and a bowl of porridge.
| {Name} did not want to ask, for asking felt like losing.
3 {He} went to the fence, and went back, and went to the fence again.
| For a long time {he} stood in the yard and drew circles with one foot.
2 Neither of them wanted to be the first to ask.
| They met at the fence, and both of them looked at their shoes.
1 "You take mine for a day," said {name}, "and I will take yours."
| So they traded, just for an afternoon, and just to see.
3 "Be careful with it," said {pal}. "I will carry it like an egg," said {name}.
| "It does not bite," said {pal}. "Nor does mine," said {name}, and they both grinned.
3 Before the sun was low, they had used them both, and each had learned something new.
| They had so much fun that nobody heard the bell for supper.
2 By evening they had to say that the other one was very good too.
| Each was surprised at how much it could do.
3 {feast}
3 {night}
1 Now the {thing} and the {other} lie side by side on the wall between the houses, for whoever needs them.
| From then on nobody asked whether the {thing} or the {other} was better, because together they were best.
| To this day the {thing} and the {other} go over the fence and back, and so do the children.
""",
    "in the attic": """
1 In the attic, under a [sheet|heap of old coats], a {hero} named {name} found a {adj} {thing} and a {adj2} {other}.
| {Day} a {trait} {hero} named {name} opened an old chest, and in it lay a {thing} and a {other}.
| Behind the chimney, where nobody ever looked, a {trait} {hero} named {name} found a {thing} and a {other}.
| A {adj} {thing} fell off the top shelf, a {other} fell after it, and a {hero} named {name} caught them both.
1 "Whose are they?" {name} asked {his} {family}, who smiled and said nothing for a while.
| {He} took them down to {his} {family}, who grew very quiet.
2 "I know them well," said {his} {family} at last. "When I was small, I used the {thing} to {use}."
| "Sit down," said {his} {family}. "Long ago, that {thing} helped me to {use}."
3 Rain was falling on the roof, and it was just the day for an old story.
| The kettle sang, and the cat came closer to listen.
2 "And the {other}?" asked {name}. "That was my best friend's, who used it to {use_other}."
| "The {other} was not mine," said {his} {family}. "It belonged to the child next door."
3 "We were never apart, the two of us, and we hid our treasures together, so that they would not be alone."
| "Every summer we met under the roof, and we swore to be friends for a hundred years."
3 "What happened then?" asked {name}. "Then we grew up, and one of us moved away."
| "Where is your friend now?" asked {name}. "Only on the other side of the hill, but hills grow with the years."
3 {Name} thought about that for a long time.
| {Name} could not sleep that night, because {he} was making a plan.
1 They had belonged to two old friends, so {name} wrote a letter, and soon there was a knock at the door.
| One had once belonged to an old friend, so {name} took the {other} and brought it back.
3 {weather}
3 {chat}
2 When the two old friends met, they laughed like children.
| Two old people stood in the hall and held each other's hands.
3 "You have grown," said one. "You have not," said the other, and they both had to wipe their eyes.
| "You still owe me a game," said one. "I have been practicing," said the other, "for fifty years."
3 There was {food} on the table, and stories until late at night.
| They ate {food} and talked so much that it got cold.
3 {night}
1 Now the {thing} and the {other} stand side by side on the windowsill, and so do two cups of tea.
| That is how a {thing} and a {other} brought two friends together again, and {name} got to hear all the stories.
| The {thing} and the {other} went back to the attic, side by side, until another child should find them.
""",
    "lost on the way": """
1 A {trait} {hero} named {name} was to bring a {adj} {thing} and a {adj2} {other} to {his} {family} on the hill.
| {Day} a {hero} named {name} set out with a {adj} {thing} under one arm and a {adj2} {other} under the other.
| "Take the {thing} and the {other} to your {family}," said Mother, and a {hero} named {name} set off.
| With a {adj} {thing} and a {adj2} {other} in a cart, a {trait} {hero} named {name} went over the hill.
2 The {thing} was needed to {use}, and the {other} was needed to {use_other}.
| "I need the one to {use}," the {family} had written, "and the other to {use_other}."
3 {weather}
3 {chat}
3 {rest}
1 But by {place} {he} looked back, and the {other} was gone.
| Halfway there {he} stopped to rest, and then {he} saw that the {other} was missing.
2 {He} wanted to cry, but crying never found anything.
| "Oh dear," said {name}, and counted again, but one and nothing still made one.
3 {He} hid the {thing} under a bush, put a stone on top, and went back down the road.
| "You stay with me," {he} told the {thing}, and held it twice as tight.
3 {He} looked behind every tree and asked at every door.
| {He} asked the ducks on the pond, but they talked only about the weather.
2 Step by step {he} went back, with {his} eyes on the ground.
| So {he} turned around and searched the whole road again.
1 Then {pal}, a child from the next farm, came running. "Is this your {other}?" {they} called.
| By a hedge sat {pal}, a child from the village, with the {other} and a puzzled face.
3 "It was lying in the road," said {pal}, "and it looked as if it belonged to somebody nice."
| "I hoped that someone would come," said {pal}, "because I did not know which way to go."
2 "You saved my day," said {name}. "Then let me carry half of it," said {pal}.
| {Name} was so glad that {he} forgot to say thank you, and then said it twice.
3 So they went on together, each with one to carry, and neither was heavy.
| They sang all the way up the hill, one high and one low.
3 At the top stood the little house, and there was {food} on the table.
| The old house smelled of {food}, and there were three plates waiting.
3 {night}
1 So the {thing} and the {other} came up the hill after all, and with them came a new friend.
| "I sent for a {thing} and a {other}," laughed {his} {family}, "and I got two children as well."
| That evening {name} said, "I lost a {other} and found a friend, and I did not even drop the {thing}."
""",
    "two presents": """
1 {Name} wanted a {thing} for {his} birthday, but {he} was a {hero} with bad luck, and what {he} got was a {other}.
| A {hero} named {name} had wished for a {adj} {thing} all year, but in the box there was a {adj2} {other}.
| "I wished for a {thing}," said a {hero} named {name}, "and this is a {other}."
| There was once a {hero} named {name} who dreamed of a {adj} {thing}, and {he} was given a {adj2} {other}.
2 {He} wanted to {use}, and one cannot do that with a {other}.
| All year {he} had thought how fine it would be to {use}.
2 {He} said thank you, as one should, but {his} chin was shaking.
| {Name} tried to smile, but only half of it came out.
3 {weather}
3 {He} took it outside, so that nobody would see {his} face.
| In the yard {he} sat down on an old box and looked at it from all sides.
3 "What is wrong?" asked a {helper}. "It is the wrong one," said {name}. "Are you sure?" asked the {helper}.
| "What a fine present!" called a {helper}. {Name} only nodded.
1 On the same day, across the street, {pal} got a {thing}, and {they} had wanted a {other}.
| Then {he} met {pal}, who had a {thing} and a long face, for {they} had asked for a {other}.
3 They sat side by side and did not say much.
| For a while they both looked at the ground, like two flowers in the rain.
3 "Mine is for people who want to {use}," said {pal}. "Mine is for people who want to {use_other}," said {name}.
| "Do you like yours?" asked {name}. "Not very much," said {pal}. "Do you?"
2 They looked at each other, and both began to grin.
| There was a long silence, and then both of them spoke at once.
1 So they traded on the spot, and two sad children became two happy ones.
| They changed the one for the other, and never was a trade made faster.
3 "Happy birthday," said {name}. "Happy birthday to you too," said {pal}, and they bowed like kings.
| "It is just as I dreamed," said {name}. "So is mine," said {pal}.
3 They tried out both, and then they tried them out together.
| All afternoon one could hear them laugh in the yard.
2 When they told it at home, everyone laughed, and nobody was cross.
| At home they had to explain it three times.
3 {feast}
3 {night}
1 The {thing} and the {other} were worn out in the end, but the friendship never was.
| Years later they forgot who had owned the {thing} and who the {other}, but not how they had met.
| Sometimes the wrong present is the right one, as long as a {thing} and a {other} live in the same street.
""",
}


def article(noun: str) -> str:
    """Return the noun with its article: "a fox", "an owl", "a unicorn"."""
    vowel = noun[:1].lower() in tuple("aeiou") and not re.match("uni|use|uku|eu|one", noun.lower())
    return f"{'an' if vowel or noun.lower().startswith(('hour', 'honest')) else 'a'} {noun}"


def beats(plot: str) -> list[tuple[int, list[str]]]:
    """Parse a plot's text into (depth, wordings) pairs, in order."""
    parts = re.split(r"^(?=[123] )", plot.strip(), flags=re.MULTILINE)[1:]
    return [
        (int(part[0]), [" ".join(w.split()) for w in re.split(r"^\| ", part[2:], flags=re.M)])
        for part in parts
    ]


FAMILIES = [[beats(plot) for plot in family.values()] for family in (FOUND, OWNED, FRIENDS, PAIRS)]
MENDED = FAMILIES[1][list(OWNED).index("broken and mended")]


def habit(rng: random.Random, noun: str, options: Sequence):
    """Return one of the options: usually the noun's habitual one, so that a fox differs from an owl,
    otherwise a random one."""
    return (
        options[zlib.crc32(noun.encode()) % len(options)]
        if rng.random() < 0.75
        else rng.choice(options)
    )


class StoryWords(dict):
    """The words of one story, by field. A missing word is drawn from FIELDS and kept."""

    def __init__(self, rng: random.Random, *nouns: str, **fields: str):
        super().__init__(fields)
        self.rng, self.nouns = rng, nouns

    def __missing__(self, key: str) -> str:
        if key[0].isupper():
            value = self[key[0].lower() + key[1:]]
            return value[0].upper() + value[1:]
        self[key] = self.expand(
            [word for word in FIELDS[key.rstrip("2")] if word not in self.values()], key
        )
        return self[key]

    def expand(self, wordings: list[str], key: str = "") -> str:
        """Choose a wording and fill it in. Avoid wordings that contain a noun of the story: in a story
        about a bell, no other bell may ring."""
        taken = re.compile(rf"(?<!{{)\b({'|'.join(map(re.escape, self.nouns))})\b")
        free = [text for text in wordings if not taken.search(text)] or wordings
        wording = habit(self.rng, f"{key} {self.nouns[0]}", free) if key else self.rng.choice(free)
        return re.sub(
            r"\[([^]]*)\]", lambda match: self.rng.choice(match[1].split("|")), wording
        ).format_map(self)


def names_for(noun: str) -> list[tuple[str, str]]:
    """Return the names that this animal or person may have, each with its pronoun."""
    return [pair for pair in NAMES if GENDER.get(noun, pair[1]) == pair[1]]


def cast(
    rng: random.Random, first: str, second: str, kinds: Mapping[str, str], name: str = ""
) -> tuple[list, StoryWords]:
    """Cast the two nouns. Return the plots that suit them, and a scene with the names and pronouns."""
    things = [noun for noun in (first, second) if kinds.get(noun, "thing") == "thing"]
    hero, *others = [noun for noun in (first, second) if noun not in things] or [
        habit(rng, first, ("girl", "boy"))
    ]
    name, he = next((pair for pair in NAMES if pair[0] == name), None) or habit(
        rng, first, names_for(hero)
    )
    friend = others[0] if others else ""
    they = GENDER.get(friend, "she" if he == "he" else "he")
    scene = StoryWords(rng, first, second, hero=hero, friend=friend, name=name)
    scene["pal"] = habit(
        rng, second, [n for n, pronoun in NAMES if pronoun == they and n[0] != name[0]]
    )
    scene |= zip(("he", "him", "his"), PRONOUNS[he], strict=True)
    same = (f"the {friend}", f"the {friend}", f"the {friend}'s")
    scene |= zip(("they", "them", "their"), same if they == he else PRONOUNS[they], strict=True)
    for thing, field, use in zip(things, ("thing", "other"), ("use", "use_other"), strict=False):
        scene |= {field: thing, use: USES.get(thing, "remember a happy day")}
        scene["broken"] = "badly torn" if thing in SOFT else "broken in two"
    if friend:
        return FAMILIES[2], scene
    if len(things) == 2:
        return FAMILIES[3], scene
    return [
        plot for plot in chain(*FAMILIES[:2]) if plot is not MENDED or things[0] in HARD | SOFT
    ], scene


def thin(rng: random.Random, plot: list[tuple[int, list[str]]], depth: int) -> list[list[str]]:
    """Return the wordings of the beats down to this depth. A few of the deepest are dropped at random, but
    never beats of depth 1 or the last one."""
    share = rng.uniform(0.5, 0.85)
    last = max(at for at, (level, _) in enumerate(plot) if level <= depth)
    return [
        wordings
        for at, (level, wordings) in enumerate(plot)
        if level < depth or (level == depth and (level == 1 or at == last or rng.random() < share))
    ]


def sentences(text: str) -> list[str]:
    """Split a text into sentences. A question within a sentence ('"Who?" he asked.') does not end the
    sentence."""
    return re.split(r'(?<=[.!?])\s+(?=["A-Z])|(?<=[.!?]")\s+(?=["A-Z])', text)


def fits(text: str, first: str, second: str, length: str) -> bool:
    """Return True if a text is a story of this length about these two nouns."""
    parts, (low, high), (least, most) = sentences(text), SENTENCES[length], WORDS[length]
    hits = [len(re.findall(rf"\b{re.escape(noun)}\b", text)) for noun in (first, second)]
    right_size = low <= len(parts) <= high and least <= len(text.split()) <= most
    return (
        right_size
        and min(hits) >= 2
        and re.search(rf"\b{re.escape(first)}\b", parts[0]) is not None
    )


def story(
    rng: random.Random,
    first: str,
    second: str,
    length: str,
    kinds: Mapping[str, str] = NOUNS,
    name: str = "",
) -> str:
    """Return a story about two different nouns, with a length from LENGTHS.

    A noun that is not in `kinds` is a thing. `name`: the hero's name; empty for a random one.
    """
    depth = LENGTHS.index(length) + 1
    while True:
        plots, scene = cast(rng, first, second, kinds, name)
        opening, *others = thin(rng, habit(rng, second, plots), depth)
        text = " ".join([scene.expand(opening, "opening"), *map(scene.expand, others)])
        text = re.sub(r"\b([Aa]) (\w+)", lambda match: match[1] + article(match[2])[1:], text)
        if fits(text, first, second, length):
            return text
