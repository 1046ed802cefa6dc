"""The LLoPS paper's theory as programs: optimal sketches, CP decompositions, fits and reports.

These are tools for looking at one layer at a time, on a host. `optimal` and `cp` compute in numpy
float64, `fit` trains with JAX.
"""

from lowrank_attn.theory.cp import RankOne as RankOne
from lowrank_attn.theory.cp import rank_one as rank_one
from lowrank_attn.theory.errors import ScoreReport as ScoreReport
from lowrank_attn.theory.errors import rmae as rmae
from lowrank_attn.theory.errors import score_report as score_report
from lowrank_attn.theory.fit import Fit as Fit
from lowrank_attn.theory.fit import fit as fit
from lowrank_attn.theory.initialise import llops_from_data as llops_from_data
from lowrank_attn.theory.initialise import llops_params as llops_params
from lowrank_attn.theory.optimal import PolynomialSketch as PolynomialSketch
from lowrank_attn.theory.optimal import optimal_sketch as optimal_sketch
