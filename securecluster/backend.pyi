import torch as torch
