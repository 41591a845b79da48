"""DAPO: reinforcement learning of language models with verifiable rewards, beside GRPO and its relatives."""
