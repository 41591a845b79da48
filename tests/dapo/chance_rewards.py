"""Rewards that are never right, or right by chance."""


def never(text, answer, extra):
    return False


def even(text, answer, extra):
    """Right for about half of all texts, so that groups have a spread whatever the model knows."""
    return sum(map(ord, text)) % 2 == 0
