"""Tasks and graders: what a model is asked, and what its answer is worth. Never imports torch.

`environment_for(run)` gives the run's environment, its digest checked; `Environment.grade` gives
the run's own reward, the same to the bit on every machine.
"""
