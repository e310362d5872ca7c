"""Losses, advantage estimators and their registries, under their documented address. They live in
`verl_omni.algorithms`, one file an algorithm."""

from verl_omni.algorithms import (
    Algorithm,
    DiffusionAdvantageEstimator,
    DiffusionLossFn,
    DiffusionLossResult,
    estimate_advantages,
    get_algorithm,
    get_diffusion_adv_estimator_fn,
    get_diffusion_loss_fn,
    register_algorithm,
    register_diffusion_adv_est,
    register_diffusion_loss,
)
from verl_omni.algorithms.advantages import compute_flow_grpo_outcome_advantage, compute_gdpo_outcome_advantage
from verl_omni.algorithms.awm import AWMLoss
from verl_omni.algorithms.crd import CRDLoss
from verl_omni.algorithms.dgpo import DGPOLoss
from verl_omni.algorithms.diffusion_nft import DiffusionNFTLoss
from verl_omni.algorithms.dpo import DPOLoss
from verl_omni.algorithms.flash_grpo import FlashGRPOLoss
from verl_omni.algorithms.flow_dppo import FlowDPPOLoss
from verl_omni.algorithms.flow_grpo import FlowGRPOLoss
from verl_omni.algorithms.grpo_guard import GRPOGuardLoss
from verl_omni.algorithms.kl import KLLoss
from verl_omni.algorithms.old_policy import OLD_POLICY_DECAY_SCHEDULES, old_policy_decay
from verl_omni.algorithms.opd import ForwardOPDLoss, OPDLoss
from verl_omni.algorithms.tempflow_grpo import TempFlowGRPOLoss

__all__ = [
    "AWMLoss",
    "Algorithm",
    "CRDLoss",
    "DGPOLoss",
    "DPOLoss",
    "DiffusionAdvantageEstimator",
    "DiffusionLossFn",
    "DiffusionLossResult",
    "DiffusionNFTLoss",
    "FlashGRPOLoss",
    "FlowDPPOLoss",
    "FlowGRPOLoss",
    "ForwardOPDLoss",
    "GRPOGuardLoss",
    "KLLoss",
    "OLD_POLICY_DECAY_SCHEDULES",
    "OPDLoss",
    "TempFlowGRPOLoss",
    "compute_flow_grpo_outcome_advantage",
    "compute_gdpo_outcome_advantage",
    "estimate_advantages",
    "get_algorithm",
    "get_diffusion_adv_estimator_fn",
    "get_diffusion_loss_fn",
    "old_policy_decay",
    "register_algorithm",
    "register_diffusion_adv_est",
    "register_diffusion_loss",
]
