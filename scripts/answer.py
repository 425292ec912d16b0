"""Continue a prompt with the model that a run left, through transformers alone.

python scripts/answer.py configs/smollm2_kjv.yaml "And the LORD said unto Moses,"
"""

from __future__ import annotations

import argparse

from transformers import AutoModelForCausalLM, AutoTokenizer

from overspill.trainer.config import load_config


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", help="the config file of a finished run")
    parser.add_argument("prompt")
    parser.add_argument("--tokens", type=int, default=40)
    arguments = parser.parse_args()
    folder = load_config(arguments.config).train.output_dir
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    inputs = tokenizer(arguments.prompt, return_tensors="pt")
    answer = model.generate(**inputs, max_new_tokens=arguments.tokens, do_sample=False, repetition_penalty=1.2)
    print(tokenizer.decode(answer[0], skip_special_tokens=True))


if __name__ == "__main__":
    main()
