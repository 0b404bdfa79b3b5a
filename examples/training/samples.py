"""Training samples: windows of prose, and conversations made of the same prose."""

from __future__ import annotations

import random
import re

import torch
from tokenizers import Tokenizer

from examples.training.corpus import Corpus
from examples.training.tokenizer import SPECIAL_TOKENS

TOKENS_PER_STEP = 2048
CHAT_SHARE = 0.15
IGNORE = -100

PEOPLE = (
    "Elizabeth", "Jane", "Lydia", "Kitty", "Mary", "Charlotte", "Mr. Darcy", "Mr. Bennet", "Mrs. Bennet",
    "Mr. Bingley", "Miss Bingley", "Mr. Collins", "Wickham", "Lady Catherine", "Miss Darcy", "Mr. Gardiner",
    "Mrs. Gardiner", "Elinor", "Marianne", "Edward", "Willoughby", "Colonel Brandon", "Lucy",
    "Mrs. Jennings", "Sir John", "Mrs. Dashwood", "John Dashwood", "Margaret", "Fanny", "Edmund",
    "Sir Thomas", "Lady Bertram", "Mrs. Norris", "Mary Crawford", "Henry Crawford", "Mr. Crawford",
    "Miss Crawford", "Tom", "Maria", "Julia", "Mr. Rushworth", "William", "Emma", "Mr. Knightley",
    "Harriet", "Mr. Woodhouse", "Mrs. Weston", "Mr. Weston", "Mr. Elton", "Mrs. Elton", "Frank Churchill",
    "Jane Fairfax", "Miss Bates", "Mr. Martin", "Catherine", "Henry Tilney", "Henry", "Miss Tilney",
    "General Tilney", "Isabella", "John Thorpe", "Mr. Thorpe", "Mrs. Allen", "James", "Anne",
    "Captain Wentworth", "Sir Walter", "Lady Russell", "Mrs. Clay", "Mary Musgrove", "Charles", "Louisa",
    "Henrietta", "Captain Benwick", "Captain Harville", "Mr. Elliot", "Mrs. Smith", "Admiral Croft",
    "Mrs. Croft", "Longbourn", "Netherfield", "Pemberley", "Rosings", "Barton", "Norland", "Mansfield",
    "Highbury", "Hartfield", "Randalls", "Bath", "Northanger", "Kellynch", "Lyme", "Uppercross", "London",
)  # fmt: skip
ABOUT = (
    "Tell me about {}.", "Who is {}?", "Write about {}.", "What do you know about {}?",
    "Tell me a story about {}.", "What happened to {}?", "{}", "Tell me more about {}, please.",
    "Write a short story about {}.", "Describe {}.", "What did {} do?", "Say something about {}.",
)  # fmt: skip
CONTINUE = (
    "Continue this: {}", "Continue the story: {}", "Go on from here: {}", "{}", "Finish this: {}",
    "Please continue: {}", "Complete this text: {}", "What comes next? {}",
)  # fmt: skip
ANYTHING = (
    "Tell me a story.", "Write a story.", "Hello", "Hello!", "Hi", "Hi there!", "Good morning.",
    "How are you?", "Tell me something.", "Say something.", "Write a paragraph.", "Tell me about love.",
    "What is love?", "Tell me about marriage.", "Write about a ball.", "Describe a walk in the country.",
    "Write a letter.", "Who are you?", "What can you do?", "Tell me a joke.", "Write a poem.",
    "What is the meaning of life?", "Once upon a time", "What is the capital of France?",
    "Explain how a computer works.", "Write a short story.", "What is happiness?", "Give me some advice.",
    "What do you think?", "Tell me about yourself.", "Test", "Tell me a long story about a family.",
    "Write a scene at dinner.", "What is a good book?", "Can you help me?",
    "Explain machine learning in one sentence.", "Write a dialogue between two sisters.", "Thank you!",
    "What should I read today?", "How is the weather?", "Describe a summer evening.", "List three things.",
)  # fmt: skip
GO_ON = (
    "Go on.", "Continue.", "And then?", "What happened next?", "Tell me more.", "Please go on.",
    "More, please.",
)  # fmt: skip
SYSTEM = ("You are a helpful assistant.", "You are a storyteller.", "You are a novelist.", "Be brief.")
SENTENCE_END = re.compile(r"(?<!\bMr)(?<!\bMrs)(?<!\bDr)(?<!\bSt)[.!?][\"')]*(?=\s+[\"'(]?[A-Z])")


class Samples:
    """Training rows: windows of prose, and conversations made of the same prose."""

    def __init__(self, corpus: Corpus, tokenizer: Tokenizer, seed: int) -> None:
        self.random = random.Random(seed)
        self.tokenizer = tokenizer
        self.chapters = corpus.chapters
        self.end, self.im_start, self.im_end = range(len(SPECIAL_TOKENS))  # the trainer numbers them first
        self.newline = self.encode("\n")
        stream: list[int] = []
        self.starts: list[int] = []  # where paragraphs begin
        blank = self.encode("\n\n")
        for chapter in corpus.chapters:
            for number, paragraph in enumerate(chapter):
                if number:
                    stream += blank
                self.starts.append(len(stream))
                stream += self.encode(paragraph)
            stream.append(self.end)
        self.stream = torch.tensor(stream)
        self.places: list[tuple[int, int]] = []  # paragraphs long enough to open a reply
        self.mentions: dict[str, list[tuple[int, int]]] = {name: [] for name in PEOPLE}
        for c, chapter in enumerate(corpus.chapters):
            for p, paragraph in enumerate(chapter):
                if len(paragraph) < 60:
                    continue
                self.places.append((c, p))
                opening = paragraph[:90]
                for name in PEOPLE:
                    if re.search(rf"\b{re.escape(name)}\b", opening):
                        self.mentions[name].append((c, p))
        self.mentions = {name: places for name, places in self.mentions.items() if len(places) >= 5}
        self.names = list(self.mentions)

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text).ids

    def reply_from(self, chapter: int, paragraph: int, skip: int = 0) -> tuple[str, int]:
        """Prose from a place on, of a random length but whole sentences.

        And the paragraph after it.
        """
        budget = self.random.choice((150, 300, 300, 500, 700))
        parts: list[str] = []
        texts = self.chapters[chapter]
        while paragraph < len(texts) and budget > 0:
            text = texts[paragraph][skip:].strip()
            skip = 0
            if len(text) > budget + 200:
                stops = [match.end() for match in SENTENCE_END.finditer(text)] + [len(text)]
                text = text[: next(stop for stop in stops if stop >= min(budget, len(text)))]
            parts.append(text)
            budget -= len(text)
            paragraph += 1
        return "\n\n".join(part for part in parts if part), paragraph

    def conversation(self) -> tuple[list[int], list[int]]:
        """One conversation as token ids and labels; only the assistant's words are to be learnt."""
        ids: list[int] = []
        labels: list[int] = []

        def say(role: str, text: str) -> None:
            head = [self.im_start, *self.encode(f"{role}\n")]
            body = [*self.encode(text), self.im_end]
            ids.extend(head + body + self.newline)
            learn = role == "assistant"
            labels.extend([IGNORE] * len(head) + (body if learn else [IGNORE] * len(body)) + [IGNORE])

        rng = self.random
        if rng.random() < 0.2:
            say("system", rng.choice(SYSTEM))
        draw = rng.random()
        skip = 0
        if draw < 0.40:
            name = rng.choice(self.names)
            question = rng.choice(ABOUT).format(name)
            chapter, paragraph = rng.choice(self.mentions[name])
        elif draw < 0.75:
            chapter, paragraph = rng.choice(self.places)
            text = self.chapters[chapter][paragraph]
            words = [match.start() for match in re.finditer(r"\s", text)]
            stops = [match.end() for match in SENTENCE_END.finditer(text[:300])]
            skip = rng.choice(stops) if stops and rng.random() < 0.5 else rng.choice(words[3:25])
            question = rng.choice(CONTINUE).format(text[:skip])
        else:
            question = rng.choice(ANYTHING)
            chapter, paragraph = rng.choice(self.places)
        say("user", question)
        reply, after = self.reply_from(chapter, paragraph, skip)
        say("assistant", reply)
        while rng.random() < 0.25 and after < len(self.chapters[chapter]):
            say("user", rng.choice(GO_ON))
            reply, after = self.reply_from(chapter, after)
            say("assistant", reply)
        return [*ids, self.end], [*labels, IGNORE]

    def row(self, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """``length`` input ids and their labels (the next ids, or IGNORE)."""
        if self.random.random() < CHAT_SHARE:
            ids: list[int] = []
            labels: list[int] = []
            while len(ids) <= length:
                more_ids, more_labels = self.conversation()
                ids += more_ids
                labels += more_labels
            return torch.tensor(ids[:length]), torch.tensor(labels[1 : length + 1])
        last = len(self.stream) - length - 1
        start = self.random.choice(self.starts) if self.random.random() < 0.5 else self.random.randrange(last)
        window = self.stream[min(start, last) :][: length + 1]
        return window[:-1], window[1:]

    def batch(self, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        rows = [self.row(length) for _ in range(TOKENS_PER_STEP // length)]
        return torch.stack([ids for ids, _ in rows]), torch.stack([labels for _, labels in rows])
