# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""A record of each evaluation set, as TFDS yields it, and what is asked.

EXPECTED has, by task: the dataset; a record; its inputs, or those of every
option; its options with the number of the right one, or its answers.
"""

STORY = "Ada had a boat.\n\nIt was red."
BLOCK = "Ada had a boat.\nIt was red."
_SCIENCE = {
  "id": "q1",
  "question": "Which is hot?",
  "choices": {"text": ["ice", "fire"], "label": [0, 1]},
  "answerKey": 1,
}
_SCIENCE_ASKED = ("Question: Which is hot?\nAnswer:", [" ice", " fire"], 1)
_EXAM = {
  "article": STORY,
  "questions": ["What colour?", "What was red? "],
  "answers": ["B", "A"],
  "options": [["blue", "red", "green", "grey"], ["boat", "car", "cat", "hat"]],
  "example_id": "high1.txt",
}
_EXAM_ASKED = (
  f"{BLOCK}\nQuestion: What colour?\nAnswer:",
  [" blue", " red", " green", " grey"],
  1,
)
_ANLI = {
  "uid": "1",
  "context": STORY,
  "hypothesis": "The boat was blue.",
  "label": 2,
}
_ANLI_ASKED = (
  f"{BLOCK}\nQuestion: The boat was blue. True, neither or false?\nAnswer:",
  [" true", " neither", " false"],
  2,
)
_SQUAD = {
  "id": "1",
  "title": "Boats",
  "context": STORY,
  "plausible_answers": {"text": ["Ada"], "answer_start": [0]},
  "question": "Who built it?",
  "is_impossible": True,
  "answers": {"text": [], "answer_start": []},
}

EXPECTED = {
  "trivia_qa": (
    "trivia_qa/unfiltered.nocontext",
    {
      "question": "Who wrote Emma?",
      "question_id": "1",
      "question_source": "web",
      "entity_pages": {
        "doc_source": [],
        "filename": [],
        "title": [],
        "wiki_context": [],
      },
      "search_results": {
        "description": [],
        "filename": [],
        "rank": [],
        "title": [],
        "url": [],
        "search_context": [],
      },
      "answer": {
        "aliases": ["Austen", "Jane Austen"],
        "normalized_aliases": ["austen", "jane austen"],
        "matched_wiki_entity_name": "",
        "normalized_matched_wiki_entity_name": "",
        "normalized_value": "jane austen",
        "type": "WikipediaEntity",
        "value": "Jane Austen",
      },
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
    {"url": "x", "question": "who wrote emma?", "answers": ["Jane Austen"]},
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
      "split_type": "indomain",
      "source_id": "activitynet~v_1",
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
      "option1": "the cup",
      "option1_normalized": "the cup",
      "option2": "the bag",
      "option2_normalized": "the bag",
      "pronoun_start": 34,
      "pronoun_end": 36,
      "pronoun_text": "it",
      "label": 0,
      "idx": 0,
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
      "query_id": "q",
    },
    f"Passage: {BLOCK}\nQuestion: How many boats?\nAnswer:",
    ["1", "one"],
  ),
  "coqa": (
    "coqa",
    {
      "source": "mctest",
      "story": STORY,
      "questions": ["What had Ada?", "Which colour?"],
      "answers": {
        "input_text": ["a boat", "red"],
        "answer_start": [0, 1],
        "answer_end": [2, 3],
      },
    },
    f"{BLOCK}\nQ: What had Ada?\nA:",
    ["a boat"],
  ),
  "quac": (
    "quac",
    {
      "context": f"{STORY} CANNOTANSWER",
      "followup": "y",
      "yesno": "x",
      "question": "Who built it?",
      "answers": {"text": ["CANNOTANSWER", "Ada"], "answer_start": [1, 0]},
      "orig_answer": {"text": "CANNOTANSWER", "answer_start": 1},
      "section_title": "History",
      "background": "Old.",
      "title": "Boats",
    },
    f"Title: Boats, History\n{BLOCK}\nQ: Who built it?\nA:",
    ["unanswerable", "Ada"],
  ),
  "squad_v2": (
    "squad/v2.0",
    _SQUAD,
    f"Title: Boats\n{BLOCK}\nQ: Who built it?\nA:",
    ["unanswerable"],
  ),
  "race_middle": ("race/middle", _EXAM, *_EXAM_ASKED),
  "race_high": ("race/high", _EXAM, *_EXAM_ASKED),
  "piqa": (
    "piqa",
    {
      "id": "1",
      "goal": "dry hands",
      "sol1": "Use a towel.",
      "sol2": "Use a lake.",
      "label": 0,
    },
    "Goal: dry hands\nAnswer:",
    [" Use a towel.", " Use a lake."],
    0,
  ),
  "arc_easy": ("ai2_arc/ARC-Easy", _SCIENCE, *_SCIENCE_ASKED),
  "arc_challenge": ("ai2_arc/ARC-Challenge", _SCIENCE, *_SCIENCE_ASKED),
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
      "fact1": "fire is hot",
      "humanScore": 1.0,
      "clarity": 2.0,
      "turkIdAnonymized": "x",
      "answerKey": 2,
    },
    "Question: A hot thing is\nAnswer:",
    [" ice", " snow", " fire", " rain"],
    2,
  ),
  "boolq": (
    "super_glue/boolq",
    {
      "question": "is the boat red",
      "passage": STORY,
      "idx": 0,
      "label": 1,
    },
    f"{BLOCK}\nQuestion: is the boat red?\nAnswer:",
    [" no", " yes"],
    1,
  ),
  "copa": (
    "super_glue/copa",
    {
      "premise": "The man was wet.",
      "choice1": "It rained.",
      "choice2": "He slept.",
      "question": "cause",
      "idx": 0,
      "label": 0,
    },
    "The man was wet because",
    [" it rained.", " he slept."],
    0,
  ),
  "rte": (
    "super_glue/rte",
    {
      "premise": STORY,
      "hypothesis": "The boat was red.",
      "idx": 0,
      "label": 0,
    },
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
      "start1": 8,
      "end1": 12,
      "start2": 13,
      "end2": 17,
      "idx": 0,
      "label": 0,
    },
    "A river bank.\nMoney in the bank.\n"
    "Question: does 'bank' mean the same in both sentences?\nAnswer:",
    [" no", " yes"],
    0,
  ),
  "multirc": (
    "super_glue/multirc",
    {
      "paragraph": "<b>Sent 1: </b>Ada had a boat.<br><b>Sent 2: </b>It was "
      "red.<br>",
      "question": "Which colour?",
      "answer": "Red",
      "idx": {"paragraph": 0, "question": 0, "answer": 0},
      "label": 1,
    },
    "Ada had a boat. It was red.\nQuestion: Which colour?\n"
    "Suggested answer: Red\nIs it right?",
    [" no", " yes"],
    1,
  ),
  "wsc": (
    "super_glue/wsc.fixed",
    {
      "text": "Ann paid Eve because she was honest.",
      "span1_text": "Ann",
      "span2_text": "she",
      "span1_index": 0,
      "span2_index": 4,
      "idx": 0,
      "label": 1,
    },
    "Ann paid Eve because she was honest.\n"
    "Question: does the pronoun 'she' mean Ann?\nAnswer:",
    [" no", " yes"],
    1,
  ),
  "record": (
    "super_glue/record",
    {
      "passage": "Ann paid Eve.\n@highlight\nEve left.",
      "query": "The money is now with @placeholder in Rome.",
      "entities": ["Ann", "Eve", "Ann"],
      "answers": ["Eve"],
      "idx": {"passage": 0, "query": 0},
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
    {
      "premise": STORY,
      "hypothesis": "The boat was blue.",
      "idx": 0,
      "label": 1,
    },
    f"{BLOCK}\nQuestion: The boat was blue. True, false or neither?\nAnswer:",
    [" true", " false", " neither"],
    1,
  ),
  "anli_r1": ("anli/r1", _ANLI, *_ANLI_ASKED),
  "anli_r2": ("anli/r2", _ANLI, *_ANLI_ASKED),
  "anli_r3": ("anli/r3", _ANLI, *_ANLI_ASKED),
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
      "annotation": "She has 1000+2 = <<1000+2=1002>>1002 boats.\n",
      "short_answer": "1,002",
    },
    "Q: Ann has 1,000 boats and buys 2. How many?\nA:",
    ["1002"],
  ),
}
