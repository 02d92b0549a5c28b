"""Questions for a chat model, made of templates: `questions(seed)` yields them for ever, most of them once.

Knows no model. All of it was written for this project; none comes from a set that acceptance is measured on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from random import Random


def _items(text: str) -> list[str]:
    """Parts of a text that lines or bars end."""
    return text.strip().replace("\n", "|").split("|")


TOPICS = _items("""
the water cycle|photosynthesis|the French Revolution|black holes|volcanoes|compound interest|vaccines|the stock market
renewable energy|machine learning|operating systems|the Roman Empire|jazz music|impressionist painting|chess openings
home gardening|bread baking|marathon training|public speaking|time management|climate change|coral reefs|honey bees
the immune system|electric cars|the printing press|the silk road|gravity|magnetism|the periodic table|probability
supply and demand|inflation|democracy|human rights|the solar system|space telescopes|earthquakes|ocean currents
sleep|nutrition|meditation|strength training|first aid|budgeting|saving for retirement|buying a house|job interviews
remote work|teamwork|customer service|marketing|small businesses|online privacy|computer viruses|databases|recursion
sorting algorithms|neural networks|version control|web servers|the Internet|mobile phones|robotics|3D printing
poetry|mythology|Shakespeare's plays|science fiction|film editing|photography|architecture|fashion design
coffee|tea|cheese|chocolate|Italian cooking|Japanese cooking|street food|wine|camping|hiking|sailing|cycling|swimming
football|basketball|tennis|yoga|dogs|cats|horses|penguins|whales|elephants|migratory birds|rain forests|deserts
glaciers|rivers|the Amazon|the Himalayas|ancient Egypt|the Vikings|the Renaissance|the Industrial Revolution
the Cold War|the space race|railways|bridges|airplanes|submarines|nuclear power|batteries|solar panels|recycling
urban planning|public transport|schools|libraries|museums|languages|translation|ethics|logic|psychology|memory
happiness|friendship|parenting|teenagers|grandparents|festivals|wedding planning|board games|video games|puzzles
magic tricks|knitting|woodworking|painting|playing the guitar|singing|dancing|theatre|stand-up comedy|journalism
""")

ABOUT = _items("""
What is {a}?|Explain {a} to a ten-year-old.|Explain {a} in simple terms.|Give me five interesting facts about {a}.
Why is {a} important?|Write a short paragraph about {a}.|Write a poem about {a}.|Write a haiku about {a}.
Tell me a short story about {a}.|Write an introduction for a blog post about {a}.|What are the main ideas behind {a}?
Make a list of ten words that have to do with {a}.|What should a beginner know about {a}?
Compare {a} and {b}.|What do {a} and {b} have in common?|Which is harder to learn, {a} or {b}? Give reasons.
Write an email to a colleague about a talk on {a}.|Suggest a title for a book about {a}.
What are common misunderstandings about {a}?|Describe the history of {a}.|How has {a} changed in the last century?
Write three questions for a quiz on {a}, with answers.|Write a dialogue between a teacher and a student about {a}.
What are the advantages and disadvantages of {a}?|Plan a one-week course about {a}.|Is {a} overrated?
Write a letter to a friend who wants to learn about {a}.|Summarize what is known about {a} in three sentences.
What jobs involve {a}?|How would you start a speech about {a}?|Give an example of {a} in everyday life.
Imagine you are an expert in {a}. What would you tell a journalist?|What is the future of {a}?
How can I get better at {a}?|What are the risks of {a}?|Outline an essay on {a} and {b}.
Write a product description for a new tool for {a}.|Write a social media post about {a}.
What tools or materials does one need for {a}?|Explain the link between {a} and {b}.
""")

NAMES = _items("""
Ada|Ben|Clara|David|Elena|Felix|Grace|Hugo|Ines|Jonas|Kira|Leo|Mina|Noah|Olga|Paul|Rosa|Sam|Tara
Viktor
""")
THINGS = _items("""
apples|pencils|books|marbles|stamps|cookies|tickets|eggs|balloons|flowers|coins|shells|stickers
cards
""")
PLACES = _items("""
France|Japan|Brazil|Canada|Kenya|India|Norway|Egypt|Mexico|Australia|Italy|Peru|Greece|Turkey|Vietnam|Spain
Poland|Chile|Morocco|Sweden|Germany|Portugal|Iceland|Thailand|Ireland|Argentina|South Africa|New Zealand|Finland
""")
FACTS = _items("""
What is the capital of {place}?|Which languages do people speak in {place}?|What is {place} known for?
What should I see on a first trip to {place}?|Which countries border {place}?|What do people eat in {place}?
Who was a famous writer from {place}?|What is the climate like in {place}?|When is the best time to visit {place}?
What is the largest city in {place}?|What currency is used in {place}?|Plan three days in {place} for a family.
""")

TASKS = _items("""
reverses a string|counts the vowels in a text|finds the largest number in a list|checks whether a number is prime
removes duplicates from a list|computes the factorial of n|sums the digits of an integer|merges two sorted lists
checks whether a word is a palindrome|returns the n-th Fibonacci number|counts the words of a sentence
converts Celsius to Fahrenheit|finds the second smallest number in a list|sorts a list of names by length
returns the average of a list of numbers|checks whether two words are anagrams|flattens a list of lists
finds the greatest common divisor of two numbers|counts how often each letter occurs|reads a file line by line
filters the even numbers of a list|multiplies two matrices|returns the longest word of a sentence|rotates a list by k
implements binary search|implements bubble sort|implements a stack|implements a queue|draws a triangle of stars
finds all pairs with a given sum|converts a number to binary|validates an email address|removes all punctuation
computes the area of a circle|finds the median of a list|capitalizes each word|computes compound interest
""")
LANGUAGES = ("Python", "Python", "Python", "JavaScript", "Java", "C")

PEOPLE = _items("""
a nurse|a pirate|a detective|a farmer|an astronaut|a librarian|a chef|a robot|a king|a gardener
a painter
""")
MOODS = _items("""
funny|sad|mysterious|hopeful|scary|romantic|adventurous|quiet
""")


def questions(seed: int) -> Iterator[str]:
    rng = Random(seed)
    kinds: list[Callable[[Random], str]] = [_about, _about, _about, _sum, _fact, _code, _story, _office]
    while True:
        yield rng.choice(kinds)(rng)


def _about(rng: Random) -> str:
    a, b = rng.sample(TOPICS, 2)
    return rng.choice(ABOUT).format(a=a, b=b)


def _fact(rng: Random) -> str:
    return rng.choice(FACTS).format(place=rng.choice(PLACES))


def _code(rng: Random) -> str:
    task, language = rng.choice(TASKS), rng.choice(LANGUAGES)
    forms = (
        f"Write a {language} function that {task}.",
        f"Write a {language} program that {task}. Explain how it works.",
        f"How do I write {language} code that {task}?",
        f'Finish this Python function.\n\ndef solve(x):\n    """A function that {task}."""\n',
    )
    return rng.choice(forms)


def _story(rng: Random) -> str:
    who, mood, topic = rng.choice(PEOPLE), rng.choice(MOODS), rng.choice(TOPICS)
    forms = (
        f"Write a {mood} story about {who} and {topic}.",
        f"Pretend to be {who} and tell me what you think of {topic}.",
        f"Write the first lines of a {mood} novel in which {who} learns about {topic}.",
        f"Describe a day in the life of {who}.",
    )
    return rng.choice(forms)


def _sum(rng: Random) -> str:
    one, other = rng.sample(NAMES, 2)
    thing, (a, b, c) = rng.choice(THINGS), (rng.randint(2, n) for n in (60, 20, 9))
    forms = (
        f"{one} has {a + b} {thing} and gives {b} of them to {other}. How many {thing} does {one} have left?",
        f"{one} buys {a} {thing} for {c} dollars each and pays with {a * c + b} dollars. How much change is there?",
        f"{one} collects {b} {thing} a day, and {other} twice as many. How many do they have together after {c} days?",
        f"A box holds {c + 2} {thing}. How many boxes does {one} need for {(c + 2) * b} {thing}?",
        f"{one} is {a} years old, {other} is {b} years older. How old will {other} be in {c} years?",
        f"A train goes {10 * b} kilometers in an hour. How far does it go in {c} hours?",
        f"{one} reads {b} pages every evening. How long does a book of {b * c} pages last?",
        f"A shirt costs {a + 10} dollars and is reduced by {5 * c} percent. What is the new price?",
        f"What is {a} times {b}? Show each step.",
        f"Solve for x: {c}x + {b} = {c * a + b}.",
        f"A rectangle is {a} cm long and {b} cm wide. What are its area and its perimeter?",
    )
    return rng.choice(forms)


def _office(rng: Random) -> str:
    name, topic, other = rng.choice(NAMES), *rng.sample(TOPICS, 2)
    forms = (
        f"Write an email to {name} to move our meeting about {topic} to next week.",
        f"Write a polite reply to {name}, who complains about our service for {topic}.",
        f"Correct the grammar: {name} dont know nothing about {topic} and they was late.",
        f"Rewrite this sentence more formally: hey {name}, that thing with {topic} was pretty cool.",
        f"Classify each as science, art or sport: {topic}, {other}.",
        f"Turn this into bullet points: {name} likes {topic}, is afraid of {other} and lives in {rng.choice(PLACES)}.",
        f"Name three books that {name} should read to learn about {topic}.",
        f"Write a to-do list for {name}, who organizes an event about {topic}.",
        f"Translate to Spanish: {name} wants to know more about {topic}.",
        f"Give a one-sentence definition of {topic}.",
    )
    return rng.choice(forms)
