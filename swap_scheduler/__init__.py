"""Decide: which block moves when, where it lies, and how long that takes. Standard library only, deterministic."""

from .check import PlanError, check
from .hazards import add_dependencies
from .order import Order, Pass, order
from .plan import Access, Block, Compute, Machine, Plan, Release, Slot, Step, Tier, Transfer, aligned, parse_op
from .planner import BudgetError, Choice, choose, plan_pass, show_bytes
from .residency import Infeasible, residency
from .simulate import simulate
from .trace import Event, Trace
from .workload import Costs, Group, Layer, Link, Workload

__all__ = [
    "Access",
    "Block",
    "BudgetError",
    "Choice",
    "Compute",
    "Costs",
    "Event",
    "Group",
    "Infeasible",
    "Layer",
    "Link",
    "Machine",
    "Order",
    "Pass",
    "Plan",
    "PlanError",
    "Release",
    "Slot",
    "Step",
    "Tier",
    "Trace",
    "Transfer",
    "Workload",
    "add_dependencies",
    "aligned",
    "check",
    "choose",
    "order",
    "parse_op",
    "plan_pass",
    "residency",
    "show_bytes",
    "simulate",
]
