"""An asynchronous schedule that a user wrote: two minibatches at a time, updated while the next two are under way.

The last stage splits its backward. Stage 0 has four minibatches in flight and two versions of its weights.
"""

OWN = """
0F0 0F1 0F2 0F3 0B0 0B1 0STEP1 0F4 0F5 0B2 0B3 0STEP3 0F6 0F7 0B4 0B5 0STEP5 0B6 0B7 0STEP7
1F0 1F1 1I0 1I1 1W0 1W1 1STEP1 1F2 1F3 1I2 1I3 1W2 1W3 1STEP3 1F4 1F5 1I4 1I5 1W4 1W5 1STEP5 1F6 1F7 1I6 1I7 1W6 1W7 1STEP7
""".strip().replace(" ", ",")  # fmt: skip # noqa: E501
