"""Word lists and tables of small facts that the synthetic stories and dialogues draw from.

Data only. Everything here was written for this project.
"""

from __future__ import annotations


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


def _pairs(text: str) -> tuple[tuple[str, str], ...]:
    """Rows of a table written as `left: right; left: right`."""
    cells = (row.partition(":") for row in text.split(";"))
    return tuple((left.strip(), right.strip()) for left, _, right in cells)


GIRLS = _words("Ada Bella Clara Dora Ella Freya Gina Hana Ines Julia Kim Lily Mara Nina Olga Priya Rosa Sara Tess Zoe")
BOYS = _words("Adam Ben Carl David Emil Felix Gus Hugo Ivan Jack Kenji Leo Max Noah Omar Paul Ravi Sam Tom Viktor")
PETS = _words("Acorn Biscuit Button Clover Dot Fern Ginger Maple Nutmeg Patch Pebble Pip Rusty Socks Tumble Willow")
ANIMALS = _words("badger bear cat dog duck fox frog goat hedgehog mole mouse otter owl rabbit squirrel turtle")
COLORS = _words("red blue green yellow orange purple pink white black brown gray silver")
TRAITS = _words("brave careful cheerful clever curious funny gentle kind patient quiet shy stubborn")
GLAD = _words("happy proud glad excited thankful delighted")
UPSET = _words("sad worried upset lonely scared nervous")
WEATHER = _words("sunny rainy windy cloudy snowy warm cold foggy")
THINGS = _words(
    "ball bell book button coin cup drum feather flute hat kite lamp lantern map mirror ring scarf shell whistle"
)
FOODS = ("apple", "bun", "carrot", "cookie", "melon", "muffin", "orange", "pancake", "pear", "plum", "sandwich")
HELPERS = ("Mom", "Dad", "Grandma", "Grandpa", "Aunt May", "Uncle Joe")
PLACES = (
    "the park", "the forest", "the beach", "the garden", "the farm", "the market", "the library", "the school",
    "the hill", "the river", "the meadow", "the harbor", "the village square", "the museum",
)  # fmt: skip
ROOMS = ("the kitchen", "the garden", "the hall", "the bedroom", "the office", "the attic", "the barn", "the yard")
SPOTS = (
    "under the bed", "behind the sofa", "in the toy box", "behind the door", "on the top shelf", "under the stairs",
    "next to the window", "in the shed", "under a heap of leaves", "inside an old boot", "in the coat pocket",
)  # fmt: skip

DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
MONTHS = (
    "January", "February", "March", "April", "May", "June",
    "July", "August", "September", "October", "November", "December",
)  # fmt: skip
NUMBER_WORDS = _words("zero one two three four five six seven eight nine ten eleven twelve")
CATEGORIES = {
    "fruit": _words("apple banana cherry grape lemon mango melon orange peach pear plum strawberry"),
    "vegetable": _words("bean beet cabbage carrot celery onion pea potato spinach turnip"),
    "tool": _words("broom brush drill hammer ladder needle rake saw shovel spoon"),
    "vehicle": _words("bike boat bus car plane ship tractor train tram truck"),
    "animal": _words("bear cat cow dog duck fox horse lion owl pig rabbit sheep"),
}
PLURAL_CATEGORIES = {
    "fruit": "fruits", "vegetable": "vegetables", "tool": "tools", "vehicle": "vehicles", "animal": "animals",
}  # fmt: skip

OPPOSITES = _pairs(
    "big: small; hot: cold; up: down; day: night; fast: slow; happy: sad; tall: short; full: empty; hard: soft; "
    "old: young; open: closed; left: right; wet: dry; loud: quiet; early: late; strong: weak; rich: poor; "
    "clean: dirty; near: far; first: last; true: false; high: low; thick: thin; sweet: sour; push: pull; begin: end"
)
PLURALS = _pairs(
    "cat: cats; box: boxes; mouse: mice; child: children; foot: feet; tooth: teeth; goose: geese; leaf: leaves; "
    "baby: babies; city: cities; man: men; woman: women; knife: knives; wolf: wolves; sheep: sheep; person: people"
)
PASTS = _pairs(
    "go: went; run: ran; eat: ate; see: saw; come: came; make: made; take: took; give: gave; find: found; "
    "think: thought; buy: bought; sing: sang; swim: swam; write: wrote; sleep: slept; fly: flew; walk: walked"
)
RHYMES = _pairs(
    "cat: hat; dog: frog; sun: run; tree: bee; star: car; moon: spoon; boat: goat; light: night; day: play; "
    "rain: train; house: mouse; king: ring; bed: red; snow: go; ball: tall; hill: mill"
)
COLOR_FACTS = _pairs(
    "grass: green; snow: white; a banana: yellow; coal: black; a carrot: orange; milk: white; a strawberry: red; "
    "chocolate: brown; an elephant: gray; a lime: green; a crow: black; a tomato: red; a flamingo: pink"
)
SOUNDS = _pairs(
    "dog: woof; cat: meow; cow: moo; duck: quack; sheep: baa; pig: oink; lion: roar; owl: hoot; frog: croak; "
    "horse: neigh; mouse: squeak; bee: buzz; snake: hiss; crow: caw; wolf: howl"
)
YOUNG = _pairs(
    "dog: a puppy; cat: a kitten; cow: a calf; sheep: a lamb; horse: a foal; pig: a piglet; hen: a chick; "
    "duck: a duckling; bear: a cub; goat: a kid; frog: a tadpole; deer: a fawn; goose: a gosling"
)
HOMES = _pairs(
    "bird: a nest; bee: a hive; fox: a den; rabbit: a burrow; spider: a web; horse: a stable; bear: a cave; "
    "cow: a barn; hen: a coop; pig: a pen; beaver: a lodge; camel: the desert; whale: the ocean; mole: a tunnel"
)
MEALS = _pairs(
    "rabbit: grass and carrots; cow: grass; cat: fish and mice; panda: bamboo; squirrel: nuts; horse: hay; "
    "monkey: fruit; frog: insects; owl: mice; lion: meat; koala: leaves; hen: corn and seeds; penguin: fish"
)
CAPITALS = _pairs(
    "France: Paris; Italy: Rome; Spain: Madrid; Germany: Berlin; Japan: Tokyo; China: Beijing; India: New Delhi; "
    "Egypt: Cairo; Greece: Athens; Portugal: Lisbon; Norway: Oslo; Sweden: Stockholm; Finland: Helsinki; "
    "Denmark: Copenhagen; Poland: Warsaw; Austria: Vienna; Canada: Ottawa; Mexico: Mexico City; Peru: Lima; "
    "Chile: Santiago; Kenya: Nairobi; Cuba: Havana; Ireland: Dublin; Hungary: Budapest; Turkey: Ankara; "
    "Australia: Canberra; Thailand: Bangkok; Vietnam: Hanoi; Iceland: Reykjavik; Belgium: Brussels; Ghana: Accra"
)
LANDMARKS = _pairs(
    "the Eiffel Tower: France; the Colosseum: Italy; the Great Wall: China; the Taj Mahal: India; "
    "the Great Pyramid: Egypt; Mount Fuji: Japan; the Parthenon: Greece; Machu Picchu: Peru"
)
WHY = (
    ("Why is the sky blue?", "Air scatters blue light more than other colors, so the sky looks blue."),
    ("Why do leaves fall in autumn?", "Days get short and cold, and trees drop their leaves to save water."),
    ("What is rain?", "Rain is water that falls from clouds when their drops grow too heavy to float."),
    ("Why do we sleep?", "Sleep lets the body rest and the brain sort what it has learned."),
    ("What is the sun?", "The sun is a star, a huge ball of hot gas that gives us light and heat."),
    ("What is the moon?", "The moon is a ball of rock that circles the Earth and shines with light from the sun."),
    ("How do plants grow?", "Plants grow from seeds. They need water, light, air and soil."),
    ("What is ice?", "Ice is water that has become so cold that it is solid."),
    ("What is a rainbow?", "A rainbow is an arc of colors that sunlight makes in drops of rain."),
    ("How many days are in a week?", "A week has seven days."),
    ("How many months are in a year?", "A year has twelve months."),
    ("What is the largest animal?", "The largest animal on Earth is the blue whale."),
    ("What do bees make?", "Bees make honey and wax."),
    ("What is bread made of?", "Bread is made of flour, water, yeast and a little salt."),
    ("What is a looped language model?", "It uses the same layers several times for each token, more for hard ones."),
    ("What is an island?", "An island is land with water on every side."),
    ("What is a volcano?", "A volcano is a mountain where hot melted rock comes out of the Earth."),
    ("How do fish breathe?", "Fish have gills that take oxygen out of the water."),
)
HOW_TO = (
    ("make a sandwich", ("Take two slices of bread.", "Butter them.", "Put cheese on one.", "Close it and cut it.")),
    ("plant a seed", ("Fill a pot with soil.", "Make a small hole.", "Put in the seed and cover it.", "Water it.")),
    ("make tea", ("Boil some water.", "Put tea in a cup.", "Pour in the water.", "Wait three minutes and drink it.")),
    ("wash my hands", ("Wet your hands.", "Add soap.", "Rub them for twenty seconds.", "Rinse and dry them.")),
    ("draw a cat", ("Draw a circle for the head.", "Add two ears.", "Draw eyes, nose and whiskers.", "Add a body.")),
    ("clean my room", ("Pick up what lies on the floor.", "Put the toys in a box.", "Make the bed.", "Open a window.")),
    ("make a friend", ("Smile and say hello.", "Tell them your name.", "Ask what they like.", "Play together.")),
    ("fall asleep", ("Turn off the lights.", "Close your eyes.", "Breathe slowly.", "Think of something calm.")),
)
COMFORT = (
    ("sad", "I am sorry that you feel sad. {Would you like to talk about it?|A walk may help a little.}"),
    ("tired", "It sounds like you need a rest. {Try to go to bed early.|Sit down for a while.}"),
    ("bored", "Let us find something to do. {You could draw a picture.|You could read a book.}"),
    ("happy", "{That is wonderful!|I am glad to hear it!} What made your day?"),
    ("nervous", "It is normal to be nervous. {Breathe slowly.|Take one small step first.}"),
    ("angry", "I understand. {Count to ten and breathe.|It may help to walk for a while.}"),
    ("lonely", "I am here to talk with you. {You could also call a friend.|You are not alone.}"),
)
JOKES = (
    "{Why was the clock sent out of class? It tocked too much.|What has a neck but no head? A bottle.|"
    "What gets wet while it dries? A towel.}"
)
SMALL_TALK = (
    ("{Hello|Hi|Good morning|Good evening}{!|.}", "{Hello|Hi}! {How can I help you?|What shall we talk about?}"),
    ("How are you{| today}?", "I am {fine|well}, thank you. {And you?|How can I help?}"),
    ("{Thank you|Thanks}{!|.}", "{You are welcome!|Any time!|I am glad that I could help.}"),
    ("{Bye|Goodbye|Good night}{!|.}", "{Goodbye!|See you soon!|Take care!}"),
    ("{Tell me a joke.|Make me laugh.}", JOKES),
    ("{Cheer me up.|Say something nice.}", "{You do better than you think.|After every rain the sun comes back.}"),
    ("{Who|What} are you?", "I am a {small|tiny} looped language model. I like {short stories|simple questions}."),
    ("What is your name?", "I {do not have a name|have no name yet}. You may call me {Loop|Echo|Dot}."),
    ("What can you do?", "I can {tell stories|do small sums}, and I can {explain words|answer simple questions}."),
    ("How do you work?", "I read words as tokens, run the same layers again and again, and a gate says when to stop."),
    ("{Can you make|Do you make} mistakes?", "Yes. I am very small, so please check what matters."),
    ("What {time|day} is it?", "I have no clock, so I can not know that."),
    ("What is your favorite color?", "I like {blue, like the sea|green, like new leaves|yellow, like the sun}."),
)  # fmt: skip
