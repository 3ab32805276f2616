"""How close is right: every bound of the numeric tests in one table, each with its reason (docs/model.md)."""

# Relative L2 of the logits of a position: the largest over positions. fp32 rounds each sum at 6e-8; through ten micro
# layers that grows to 1e-6 (measured, largest 3e-6). A wrong formula gives 1e-1, a lost token 1e-2.
FLOAT32 = 1e-5

# The same between two forms of one program (TP, padding, packing, cuts): both round, neither is wrong.
SAME = 1e-5

# Rounding flips a choice of experts that is closer than this; prompts and seeds are picked to stay above it.
MARGIN = 5e-6

# bf16 against float64: median over positions. 0.05 is expected, a flipped expert alone gives up to 0.3.
BFLOAT16_MEDIAN = 0.15

# A planted mistake must move the logits by at least this: thousands of times FLOAT32, less than any that was measured.
MISTAKE = 0.07

# One kernel against a float64 loop, relative to the largest element: sums of some hundred terms, each rounded once.
KERNEL = 2e-6
# KDA's chunks side by side in tiles: an exponent of up to 40 is rounded by half an ulp, 2e-6, in each of two factors,
# and the sums of all tiles are one product, in whatever order the machine adds.
TILES = 4e-6

# Chi-square of tokens drawn against their probabilities, 5 degrees of freedom: the value that one in a thousand fair
# draws exceeds. Seeds are fixed, so the test never flickers.
CHI_SQUARE_5 = 20.5
