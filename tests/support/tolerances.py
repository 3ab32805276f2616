"""The tolerances of all numeric tests in one table, each with its reason (docs/model.md)."""

# Relative L2 error of a position's logits, the largest over positions. fp32 rounds each sum at 6e-8; over ten micro
# layers that grows to 1e-6 (largest measured: 3e-6). A wrong formula gives 1e-1, a lost token 1e-2.
FLOAT32 = 1e-5

# The same between two forms of one program (TP, padding, packing, cuts): both round, and neither is more exact.
SAME = 1e-5

# Rounding may flip a choice of experts that is closer than this; prompts and seeds are chosen to stay above it.
MARGIN = 5e-6

# bf16 against float64, median over positions. 0.05 is expected; a single flipped expert gives up to 0.3.
BFLOAT16_MEDIAN = 0.15

# A planted mistake must move the logits by at least this: thousands of times FLOAT32, and less than any measured one.
MISTAKE = 0.07

# One kernel against a float64 loop, relative to the largest element: sums of some hundred terms, each rounded once.
KERNEL = 2e-6
# KDA's chunks in parallel as tiles. An exponent of up to 40 is rounded by half an ulp, 2e-6, in each of two factors.
# The sums of all tiles are one product, and the machine chooses the order of its additions.
TILES = 4e-6

# Chi-square of drawn tokens against their probabilities, 5 degrees of freedom: one in a thousand fair draws exceeds
# this value. Seeds are fixed, so that the test never flickers.
CHI_SQUARE_5 = 20.5
