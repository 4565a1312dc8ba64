"""Four ranks that train on digits for 50 steps with any lossless pipeline equal one process on the whole batch.

Equal within float32 rounding, which means here: no parameter differs by more than `BOUND` of the largest one, with

    BOUND = STEPS * eps = 50 * 2**-23 = 6e-6,

that is one unit in the last place of the largest parameter for each step. Why that is what rounding can do: both trainings
compute p <- p - lr * g. In every step each of them rounds p to half a unit at most, one unit between the two. The two
gradients are the same sum of 96 terms in two orders and differ by c * eps of the largest gradient G, and
lr * c * G is small beside the largest parameter P = 0.5: G = 0.04 at most, lr = 0.1, and c stays below 20. What is there
already does not grow, since gradient descent with a step below 2 / curvature contracts, and tanh leaves no kinks at which
a rounding could switch a unit on. So units add up, at worst, and mostly cancel.
"""
