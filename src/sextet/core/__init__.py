"""The training core: run directories, seeding, checkpoints, metrics, workers and reports.

The core never calls a method; a method calls the core. Nothing here imports a recipe.
"""
