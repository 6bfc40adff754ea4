"""Exchange of labels with other tools: one file per tool, and `Labels`, which all of them write.

    coco            COCO Camera Traps JSON, one annotation per image
    megadetector    JSON of MegaDetector, which Timelapse reads, and of SpeciesNet
    label_studio    tasks with predictions for Label Studio, and its annotations as known labels
    fiftyone        a folder that FiftyOne imports, and labels of one that it exported
    huggingface     columns of a Hugging Face dataset, and embeddings of its images
    vectors         Parquet with vectors, for LanceDB and Embedding Atlas

cleanlab needs no file: it takes `result.probs` directly.
"""

from moontide.integrations.labels import Labels

__all__ = ["Labels"]
