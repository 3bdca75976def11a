# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""A record of each evaluation set, in TFDS's form, and the expected question.

EXPECTED has, by task: the dataset; a record, with the fields that are read; its
inputs, or the inputs of every option; its options with the number of the right
option, or its answers.
"""

STORY = "Ada had a boat.\n\nIt was red."
BLOCK = "Ada had a boat.\nIt was red."
NO_YES = [" no", " yes"]

_SCIENCE = (
  {
    "question": "Which is hot?",
    "choices": {"text": ["ice", "fire"], "label": [0, 1]},
    "answerKey": 1,
  },
  "Question: Which is hot?\nAnswer:",
  [" ice", " fire"],
  1,
)
_EXAM = (
  {
    "article": STORY,
    "questions": ["What colour?", "What was red? "],
    "answers": ["B", "A"],
    "options": [
      ["blue", "red", "green", "grey"],
      ["boat", "car", "cat", "hat"],
    ],
  },
  f"{BLOCK}\nQuestion: What colour?\nAnswer:",
  [" blue", " red", " green", " grey"],
  1,
)
_ANLI = (
  {"context": STORY, "hypothesis": "The boat was blue.", "label": 2},
  f"{BLOCK}\nQuestion: The boat was blue. True, neither or false?\nAnswer:",
  [" true", " neither", " false"],
  2,
)

EXPECTED = {
  "trivia_qa": (
    "trivia_qa/unfiltered.nocontext",
    {
      "question": "Who wrote Emma?",
      "answer": {"aliases": ["Austen", "Jane Austen"], "value": "Jane Austen"},
    },
    "Q: Who wrote Emma?\nA:",
    ["Jane Austen", "Austen"],
  ),
  "natural_questions": (
    "natural_questions_open",
    {"question": "who wrote emma", "answer": ["Jane Austen", "Austen"]},
    "Q: who wrote emma?\nA:",
    ["Jane Austen", "Austen"],
  ),
  "web_questions": (
    "web_questions",
    {"question": "who wrote emma?", "answers": ["Jane Austen"]},
    "Q: who wrote emma?\nA:",
    ["Jane Austen"],
  ),
  "lambada": (
    "lambada",
    {"passage": "She saw the boat and took the boat"},
    "She saw the boat and took the ____. ->",
    ["boat"],
  ),
  "hellaswag": (
    "hellaswag",
    {
      "context": "A man sits in a boat. he",
      "endings": ["rows.", "flies.", "melts.", "sings a car."],
      "activity_label": "Rowing",
      "label": 0,
    },
    "Rowing: A man sits in a boat. he",
    [" rows.", " flies.", " melts.", " sings a car."],
    0,
  ),
  "story_cloze": (
    "story_cloze/2016",
    {"context": STORY, "endings": ["She rowed.", "She flew."], "label": 0},
    BLOCK,
    [" She rowed.", " She flew."],
    0,
  ),
  "winograd": (
    "wsc273",
    {
      "text": "The cup is not in the bag because it is big.",
      "option1_normalized": "the cup",
      "option2_normalized": "the bag",
      "pronoun_start": 34,
      "pronoun_end": 36,
      "label": 0,
    },
    [
      "The cup is not in the bag because the cup",
      "The cup is not in the bag because the bag",
    ],
    [" is big.", " is big."],
    0,
  ),
  "winogrande": (
    "winogrande",
    {
      "sentence": "Ann paid Eve because _ was honest.",
      "option1": "Ann",
      "option2": "Eve",
      "label": 0,
    },
    ["Ann paid Eve because Ann", "Ann paid Eve because Eve"],
    [" was honest.", " was honest."],
    0,
  ),
  "drop": (
    "drop",
    {
      "passage": STORY,
      "question": "How many boats?",
      "answer": "1",
      "validated_answers": ["one", "1"],
    },
    f"Passage: {BLOCK}\nQuestion: How many boats?\nAnswer:",
    ["1", "one"],
  ),
  "coqa": (
    "coqa",
    {
      "story": STORY,
      "questions": ["What had Ada?", "Which colour?"],
      "answers": {"input_text": ["a boat", "red"]},
    },
    f"{BLOCK}\nQ: What had Ada?\nA:",
    ["a boat"],
  ),
  "quac": (
    "quac",
    {
      "title": "Boats",
      "section_title": "History",
      "context": f"{STORY} CANNOTANSWER",
      "question": "Who built it?",
      "answers": {"text": ["CANNOTANSWER", "Ada"]},
    },
    f"Title: Boats, History\n{BLOCK}\nQ: Who built it?\nA:",
    ["unanswerable", "Ada"],
  ),
  "squad_v2": (
    "squad/v2.0",
    {
      "title": "Boats",
      "context": STORY,
      "question": "Who built it?",
      "answers": {"text": []},
    },
    f"Title: Boats\n{BLOCK}\nQ: Who built it?\nA:",
    ["unanswerable"],
  ),
  "race_middle": ("race/middle", *_EXAM),
  "race_high": ("race/high", *_EXAM),
  "piqa": (
    "piqa",
    {
      "goal": "dry hands",
      "sol1": "Use a towel.",
      "sol2": "Use a lake.",
      "label": 0,
    },
    "Goal: dry hands\nAnswer:",
    [" Use a towel.", " Use a lake."],
    0,
  ),
  "arc_easy": ("ai2_arc/ARC-Easy", *_SCIENCE),
  "arc_challenge": ("ai2_arc/ARC-Challenge", *_SCIENCE),
  "openbookqa": (
    "openbookqa",
    {
      "question": {
        "stem": "A hot thing is",
        "choice_A": "ice",
        "choice_B": "snow",
        "choice_C": "fire",
        "choice_D": "rain",
      },
      "answerKey": 2,
    },
    "Question: A hot thing is\nAnswer:",
    [" ice", " snow", " fire", " rain"],
    2,
  ),
  "boolq": (
    "super_glue/boolq",
    {"question": "is the boat red", "passage": STORY, "label": 1},
    f"{BLOCK}\nQuestion: is the boat red?\nAnswer:",
    NO_YES,
    1,
  ),
  "copa": (
    "super_glue/copa",
    {
      "premise": "The man was wet.",
      "choice1": "It rained.",
      "choice2": "He slept.",
      "question": "cause",
      "label": 0,
    },
    "The man was wet because",
    [" it rained.", " he slept."],
    0,
  ),
  "rte": (
    "super_glue/rte",
    {"premise": STORY, "hypothesis": "The boat was red.", "label": 0},
    f"{BLOCK}\nQuestion: The boat was red. True or false?\nAnswer:",
    [" true", " false"],
    0,
  ),
  "wic": (
    "super_glue/wic",
    {
      "word": "bank",
      "sentence1": "A river bank.",
      "sentence2": "Money in the bank.",
      "label": 0,
    },
    "A river bank.\nMoney in the bank.\n"
    "Question: does 'bank' mean the same in both sentences?\nAnswer:",
    NO_YES,
    0,
  ),
  "multirc": (
    "super_glue/multirc",
    {
      "paragraph": "<b>Sent 1: </b>Ada had a boat.<br><b>Sent 2: </b>It was "
      "red.<br>",
      "question": "Which colour?",
      "answer": "Red",
      "label": 1,
    },
    "Ada had a boat. It was red.\nQuestion: Which colour?\n"
    "Suggested answer: Red\nIs it right?",
    NO_YES,
    1,
  ),
  "wsc": (
    "super_glue/wsc.fixed",
    {
      "text": "Ann paid Eve because she was honest.",
      "span1_text": "Ann",
      "span2_text": "she",
      "label": 1,
    },
    "Ann paid Eve because she was honest.\n"
    "Question: does the pronoun 'she' mean Ann?\nAnswer:",
    NO_YES,
    1,
  ),
  "record": (
    "super_glue/record",
    {
      "passage": "Ann paid Eve.\n@highlight\nEve left.",
      "query": "The money is now with @placeholder in Rome.",
      "entities": ["Ann", "Eve", "Ann"],
      "answers": ["Eve"],
    },
    "Ann paid Eve.\n-\nEve left.\n-",
    [
      " The money is now with Ann in Rome.",
      " The money is now with Eve in Rome.",
    ],
    1,
  ),
  "cb": (
    "super_glue/cb",
    {"premise": STORY, "hypothesis": "The boat was blue.", "label": 1},
    f"{BLOCK}\nQuestion: The boat was blue. True, false or neither?\nAnswer:",
    [" true", " false", " neither"],
    1,
  ),
  "anli_r1": ("anli/r1", *_ANLI),
  "anli_r2": ("anli/r2", *_ANLI),
  "anli_r3": ("anli/r3", *_ANLI),
  "mmlu": (
    "mmlu",
    {
      "question": "What is 2 + 2?",
      "subject": "arithmetic",
      "choices": ["1", "4", "5", "6"],
      "answer": 1,
    },
    "What is 2 + 2?\nA. 1\nB. 4\nC. 5\nD. 6\nAnswer:",
    [" A", " B", " C", " D"],
    1,
  ),
  "gsm8k": (
    "gsm8k",
    {
      "question": "Ann has 1,000 boats and buys 2. How many?",
      "answer": "She has 1000+2 = <<1000+2=1002>>1002 boats.\n#### 1,002",
    },
    "Q: Ann has 1,000 boats and buys 2. How many?\nA:",
    ["1002"],
  ),
}
