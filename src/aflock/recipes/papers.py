"""The five papers, as the pages name them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Paper:
    """One paper."""

    short: str
    year: str
    title: str
    source: str


PAPERS = {
    "000": Paper(
        "ACE",
        "under review",
        "Mitigating Participation Imbalance Bias in Asynchronous Federated Learning under Client Heterogeneity",
        "Anonymous authors, under review",
    ),
    "001": Paper(
        "MR.AsyncFL",
        "under review",
        "MR.AsyncFL: Staleness-Aware Aggregation for Asynchronous Federated Learning via Model Replacement",
        "Anonymous authors, under review",
    ),
    "002": Paper(
        "MasFL",
        "2025",
        "Momentum-Driven Adaptivity: Towards Tuning-Free Asynchronous Federated Learning",
        "Yan, Zhong, Wang, Zhang, ICML 2025",
    ),
    "003": Paper("AFA", "2022", "Anarchic Federated Learning", "Yang, Zhang, Khanduri, Liu, ICML 2022"),
    "004": Paper(
        "AFL",
        "2024",
        "Asynchronous Federated Learning: A Scalable Approach for Decentralized Machine Learning",
        "Forootani and Iervolino, arXiv:2412.17723, 2024",
    ),
}
