"""Generate tokens from a tiny model: one forward pass and one draw a token, repeatable by a seed."""

import random

import infinicore
from infinicore import Tensor, nn
from infinicore.nn.functional import random_sample

# S sequence, V vocabulary


class BigramModel(nn.Module):
    """The next token's logits from the last token alone: [S] -> [V]"""

    def __init__(self, vocab_size: int, hidden_size: int, eos_token_id: int) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(vocab_size, hidden_size)
        self.lm_head = nn.Linear(hidden_size, vocab_size, bias=False)
        self.eos_token_id = eos_token_id

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.lm_head(self.embed_tokens(input_ids[-1]))


def generate_token(
    model: BigramModel,
    input_ids: Tensor,
    generator: random.Random,
    temperature: float = 0.8,
    topp: float = 0.9,
    topk: int = 50,
) -> Tensor:
    logits = model(input_ids)
    return random_sample(logits, generator.random(), topp=topp, topk=topk, temperature=temperature)


def generate_text(
    model: BigramModel, prompt_ids: list[int], seed: int, max_tokens: int = 100, **sampling: float
) -> list[int]:
    """The prompt and what follows it, up to and with the end token."""
    generator = random.Random(seed)
    generated = list(prompt_ids)
    for _ in range(max_tokens):
        next_token = generate_token(model, infinicore.tensor(generated), generator, **sampling)
        generated.append(next_token.item())
        if generated[-1] == model.eos_token_id:
            break
    return generated


def main() -> None:
    infinicore.manual_seed(0)
    model = BigramModel(vocab_size=100, hidden_size=16, eos_token_id=2)
    print("seed 0:", generate_text(model, [1, 5], seed=0, max_tokens=20))
    print("again: ", generate_text(model, [1, 5], seed=0, max_tokens=20))
    print("seed 1:", generate_text(model, [1, 5], seed=1, max_tokens=20))


if __name__ == "__main__":
    main()
