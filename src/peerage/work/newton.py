"""Second derivatives of logistic regression, and the matrix operations of FedNL.

A model with C classes is C binary problems, one class against the rest. Each has p parameters, the
weights of the class and then its bias, and a Hessian [p, p]. All are float32.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from peerage.errors import InputError
from peerage.randomness import torch_stream
from peerage.requests import Compute
from peerage.vectors import FlatModel, Layout, head_layer
from peerage.work.context import Batches, LocalContext
from peerage.work.losses import with_features

ROWS = 1000  # examples in one product: full speed with little memory
SMALL = 128  # rows up to which the full decomposition of a matrix is fast enough
SPARE = 4  # extra vectors in a block, for eigenvalues that nearly coincide
# Of the residual, relative to the largest eigenvalue; full decomposition in float32 reaches 1e-6.
TOLERANCE = 3e-6
ORTHOGONAL = 1e-5  # largest product of two different vectors
# Blocks before the first check of the residual, and the growth of the basis between checks.
FIRST_CHECK, GROWTH = 10.0, 1.25


# A flat vector [d] as the rows [C, p] of the binary problems


def problems(layout: Layout) -> tuple[int, int]:
    """(C, p) of a model with one linear layer; raise an InputError for other models."""
    shapes = [slot.shape for slot in layout.slots]
    if len(shapes) != 2 or len(shapes[0]) != 2 or shapes[1] != shapes[0][:1]:
        raise InputError(
            f"fednl requires logistic regression, one linear layer, but this model has the layers "
            f"{', '.join(layout.layers)}; use --model logistic"
        )
    classes, inputs = shapes[0]
    return classes, inputs + 1


def to_rows(layout: Layout, vector: Tensor) -> Tensor:
    weight, bias = (slot.view(vector) for slot in layout.slots)
    return torch.cat([weight, bias[:, None]], dim=1)


def to_vector(rows: Tensor) -> Tensor:
    return torch.cat([rows[:, :-1].reshape(-1), rows[:, -1]])


# Derivatives


@dataclass(frozen=True)
class Derivatives(Compute[tuple[Tensor, Tensor]]):
    """Gradients [C, p] and Hessians [C, p, p] on the node's own data, at these parameters.

    The loss is the mean of log(1 + exp(-s z)) over examples, with s = 1 for the class and -1 for
    the rest, plus (penalty / 2) |x|^2 over all p parameters.
    """

    phase: ClassVar[str] = "curvature"

    params: Tensor
    buffers: Tensor
    penalty: float

    def run(self, local: LocalContext) -> tuple[Tensor, Tensor]:
        model = local.model(self.params, self.buffers)
        model.module.eval()
        count = max(len(local.indices), 1)
        with torch.no_grad():
            g, h = sum_derivatives(model, local.data.chunks(local.indices, ROWS), 1 / count)
            g.add_(to_rows(model.layout, self.params), alpha=self.penalty)
            h.diagonal(dim1=1, dim2=2).add_(self.penalty)
        return g, h


def sum_derivatives(model: FlatModel, batches: Batches, weight: float) -> tuple[Tensor, Tensor]:
    """Both derivatives of the losses, summed over the examples with this weight."""
    classes, size = problems(model.layout)
    g, h = torch.zeros(classes, size), torch.zeros(classes, size, size)
    head = head_layer(model.module)
    if head.weight is not model.tensors[0]:
        raise InputError(
            "fednl requires logistic regression, but the last linear layer of this model is "
            "frozen; freeze the layers before it instead"
        )
    for x, y in batches:
        logits, features = with_features(model.module, head, x)
        x = torch.cat([features, torch.ones(len(y), 1)], dim=1)  # [n, p]
        s = torch.sigmoid(logits)
        roots = (weight * s * (1 - s)).sqrt_()
        s[torch.arange(len(y)), y] -= 1
        g.addmm_(s.T, x, alpha=weight)
        scaled = torch.empty_like(x)
        for c in range(classes):
            torch.mul(x, roots[:, c : c + 1], out=scaled)
            h[c].addmm_(scaled.T, scaled)
    return g, h


# The compressor: the `rank` eigenvalues of largest magnitude, and their vectors


@dataclass(frozen=True)
class Compress(Compute[tuple[Tensor, Tensor, Tensor]]):
    """Low-rank approximation of the differences between matrices [C, p, p] and `known`.

    Returns the leading eigenvalues [C, R], their vectors [C, R, p] and the Frobenius norms [C] of
    the differences. It needs no local data, but is a request because it takes time.
    """

    phase: ClassVar[str] = "curvature"

    matrices: Tensor
    known: Tensor
    rank: int

    def run(self, local: LocalContext) -> tuple[Tensor, Tensor, Tensor]:
        found = [self.one(a, h) for a, h in zip(self.matrices, self.known, strict=True)]
        values, vectors, norms = zip(*found, strict=True)
        return torch.stack(values), torch.stack(vectors), torch.stack(norms)

    def one(self, a: Tensor, h: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        difference = a - h
        return *leading(difference, self.rank), difference.norm()


def leading(matrix: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """The eigenvalues [R] of largest magnitude, in descending order, and their vectors [R, p].

    For a 785 x 785 matrix, the full decomposition takes 40 to 90 ms, for each of 10 classes and
    each client. A block Krylov method reaches the same residual in 2 to 10 ms on Hessians of
    images, and in 10 to 20 ms on random ones. ARPACK (scipy's eigsh) is about as fast with one
    thread, but starts its own threads, which slow other workers and on which results could depend.
    As it starts from a single vector, it may also miss one of two equal eigenvalues.
    """
    if len(matrix) <= SMALL or 16 * rank > len(matrix):
        return largest(matrix, rank)
    return krylov(matrix, rank) or largest(matrix, rank)


def largest(matrix: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    values, vectors = torch.linalg.eigh(matrix)
    order = values.abs().argsort(descending=True, stable=True)[:rank]
    return values[order], vectors[:, order].T.contiguous()


def krylov(matrix: Tensor, rank: int) -> tuple[Tensor, Tensor] | None:
    """As `leading`, by a block Krylov method; None if it does not converge fast enough."""
    size, block = len(matrix), rank + SPARE
    basis, image = torch.empty(2, size // 2, size)  # orthonormal rows, and rows @ matrix
    rows = torch.randn(block, size, generator=torch_stream(0, "krylov", size))
    next_check = FIRST_CHECK * block
    for known in range(block, len(basis) + 1, block):
        added = slice(known - block, known)
        basis[added] = torch.linalg.qr(rows.T).Q.T
        rows = torch.mm(basis[added], matrix, out=image[added])
        q, q_t = basis[:known], basis[:known].T
        if known >= next_check:
            next_check = GROWTH * known
            values, mixture = largest(image[:known] @ q_t, rank)  # the best pairs in the basis
            vectors = mixture @ q
            if _accurate(values, vectors, mixture @ image[:known]):
                return values, vectors
        for _ in range(2):  # a single pass leaves rounding errors that grow
            rows = torch.addmm(rows, torch.mm(rows, q_t), q, alpha=-1)
    return None


def _accurate(values: Tensor, vectors: Tensor, image: Tensor) -> bool:
    """Whether these are eigenpairs; a matrix of low rank may exhaust the basis early."""
    residual = torch.addcmul(image, vectors, values[:, None], value=-1).norm(dim=1)
    overlap = vectors @ vectors.T - torch.eye(len(values))
    return bool(residual.max() <= TOLERANCE * values[0].abs() and overlap.abs().max() < ORTHOGONAL)


def add_pairs(matrices: Tensor, values: Tensor, vectors: Tensor) -> Tensor:
    """Matrices [C, p, p] plus the sum of value * vector vector^T over pairs [C, k], [C, k, p]."""
    total = torch.empty_like(matrices)
    for c, v in enumerate(vectors):  # one by one, as each fits into the cache
        torch.addmm(matrices[c], (v * values[c, :, None]).T, v, out=total[c])
    return total


# Symmetric matrices in messages


def upper(matrices: Tensor) -> Tensor:
    """[C, p (p + 1) / 2] the upper triangles of matrices [C, p, p], row by row."""
    i, j = torch.triu_indices(*matrices.shape[1:]).unbind()
    return matrices[:, i, j]


def from_upper(triangles: Tensor, size: int) -> Tensor:
    """[C, p, p] the symmetric matrices with these upper triangles."""
    i, j = torch.triu_indices(size, size).unbind()
    matrices = torch.empty(len(triangles), size, size)
    matrices[:, i, j] = triangles
    matrices[:, j, i] = triangles
    return matrices


# The Newton step, one problem at a time: all matrices together are too large for the cache


def solve_projected(h: Tensor, g: Tensor, floor: float) -> Tensor:
    """h^-1 g for h [p, p], with eigenvalues below the floor raised to it."""
    values, vectors = torch.linalg.eigh(h)
    step: Tensor = vectors @ ((vectors.T @ g) / values.clamp(min=floor))
    return step


def solve_shifted(h: Tensor, shift: Tensor, g: Tensor, floor: float) -> Tensor:
    """(h + shift I)^-1 g, for a shift that should leave no eigenvalue below the floor.

    As the shift may come from other clients than h, eigenvalues clearly below are raised to it.
    """
    shifted = h.clone()
    shifted.diagonal().add_(shift - floor / 2)
    low = bool(torch.linalg.cholesky_ex(shifted).info)
    shifted.diagonal().add_(floor / 2)
    if low:
        return solve_projected(shifted, g, floor)
    return torch.cholesky_solve(g[:, None], torch.linalg.cholesky(shifted))[:, 0]
