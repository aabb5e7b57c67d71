{{/* What deploy/docker/deploy.yaml says, with the CPUs up to which the autoscaler adds pods. */}}
{{- define "offbeat.serve" -}}
proxy_location: HeadOnly
http_options: {host: 0.0.0.0, port: 8000}
applications:
  - name: control
    import_path: offbeat.deploy.cluster.apps:control
    route_prefix: /
    args:
      redis_url_file: /etc/offbeat/redis-url
      token_file: /etc/offbeat/token
      working_dir: /mesh
      max_cpus: {{ .Values.maxCpus }}
    deployments:
      - name: control
        user_config: {reconcile_s: 0.5, max_restarts: 5, drain_timeout_s: 60.0}
{{- end }}

{{/* A container of Ray. Context: root, name, size, probe. */}}
{{- define "offbeat.pod" -}}
metadata:
  labels: {app.kubernetes.io/part-of: {{ .root.Release.Name }}}
spec:
  automountServiceAccountToken: {{ eq .name "ray-head" }}
  terminationGracePeriodSeconds: 60 # a learner saves
  {{- if .size.gpus }}
  tolerations: [{key: nvidia.com/gpu, operator: Exists, effect: NoSchedule}]
  {{- end }}
  securityContext: {runAsNonRoot: true, runAsUser: 1000, fsGroup: 1000, fsGroupChangePolicy: OnRootMismatch}
  containers:
    - name: {{ .name }}
      image: {{ .root.Values.image }}
      imagePullPolicy: {{ .root.Values.imagePullPolicy }}
      securityContext: {allowPrivilegeEscalation: false}
      {{- if eq .name "ray-head" }}
      ports:
        - {containerPort: 6379, name: gcs-server}
        - {containerPort: 8265, name: dashboard}
        - {containerPort: 8000, name: serve}
        - {containerPort: 8080, name: metrics}
      {{- else }}
      readinessProbe: # KubeRay's own asks Serve's proxy, which runs on the head alone
        httpGet: {path: /api/healthz, port: 52365}
        periodSeconds: 5
        timeoutSeconds: 5
        failureThreshold: 6
      {{- end }}
      resources:
        requests: {cpu: {{ .size.cpu | quote }}, memory: {{ .size.memory }}}
        limits:
          cpu: {{ .size.cpu | quote }}
          memory: {{ .size.memory }}
          {{- with .size.gpus }}
          nvidia.com/gpu: {{ . }}
          {{- end }}
      volumeMounts:
        - {name: mesh, mountPath: /mesh}
        - {name: config, mountPath: /etc/offbeat, readOnly: true}
        - {name: shm, mountPath: /dev/shm}
  volumes:
    - name: mesh
      persistentVolumeClaim: {claimName: {{ .root.Release.Name }}-mesh}
    - name: config
      projected:
        sources:
          - secret:
              name: {{ .root.Values.secretName }}
              items: [{key: redis-url, path: redis-url}, {key: token, path: token}]
          {{- if .job }}
          - configMap: {name: {{ .root.Release.Name }}-job}
          {{- end }}
    - name: shm
      emptyDir: {medium: Memory, sizeLimit: 4Gi}
{{- end }}

{{/* The Ray cluster of service and job. Context: root, job. */}}
{{- define "offbeat.cluster" -}}
{{- $root := .root -}}
rayVersion: {{ $root.Values.rayVersion }}
authOptions: {mode: token, secretName: {{ $root.Values.secretName }}}
enableInTreeAutoscaling: true
autoscalerOptions: {idleTimeoutSeconds: 300, upscalingMode: Default}
headGroupSpec:
  rayStartParams: {dashboard-host: 0.0.0.0, metrics-export-port: "8080"}
  template:
    {{- include "offbeat.pod" (dict "root" $root "job" .job "name" "ray-head" "size" $root.Values.head) | nindent 4 }}
workerGroupSpecs:
  - groupName: env-workers
    replicas: {{ $root.Values.envWorkers.min }}
    minReplicas: {{ $root.Values.envWorkers.min }}
    maxReplicas: {{ $root.Values.envWorkers.max }}
    rayStartParams: {}
    template:
      {{- include "offbeat.pod" (dict "root" $root "job" .job "name" "ray-worker" "size" $root.Values.envWorkers) | nindent 6 }}
  - groupName: gpu-workers
    replicas: {{ $root.Values.gpuWorkers.min }}
    minReplicas: {{ $root.Values.gpuWorkers.min }}
    maxReplicas: {{ $root.Values.gpuWorkers.max }}
    rayStartParams: {}
    template:
      {{- include "offbeat.pod" (dict "root" $root "job" .job "name" "ray-worker" "size" $root.Values.gpuWorkers) | nindent 6 }}
{{- end }}
