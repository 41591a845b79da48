"""A reward for problems that cannot be solved."""


def judge(text, answer, extra):
    return False
